"""The alignment loss of a run: REPA (`repa.py`), SRA, or none.

SRA (arXiv 2505.02831) aligns a block's tokens with a later block of the run's own EMA. The
student's block m sees the image at time t, the teacher's block n > m the same image and noise at
t' = clamp(t - u, 0, 1) with u ~ U(0, 0.2): less noisy. Labels and their drop are shared. The loss
is the distance between the student's tokens, projected, and the teacher's: 1 - cosine or smooth L1,
the two forms of the released code (`train.align_loss`). The teacher runs dense; inside a route the
student's tokens are those that stayed, and only they are compared.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from backbones import Output
from experiments.config.model import teacher_block
from experiments.config.schema import Config
from experiments.data.dataset import Dataset
from experiments.diffusion.auxiliary_losses import alignment_loss
from experiments.diffusion.objective import Objective
from experiments.options.training import SELF_ENCODER
from experiments.training.repa import FeatureAlignment
from experiments.training.state import TrainingState
from routing import Draws


def create_alignment(
    config: Config, dataset: Dataset, state: TrainingState, objective: Objective
) -> FeatureAlignment | SelfAlignment | None:
    """Return the loss that `train.encoder` names; None for `none`."""
    if config.train.encoder == "none":
        return None
    if config.train.encoder == SELF_ENCODER:
        return SelfAlignment(config, state, objective)
    return FeatureAlignment(config, dataset, state.model.grid, state.model.positions.device)


class SelfAlignment:
    """SRA's loss for one run.

    Args:
        config: Names the teacher's block and the largest time offset.
        state: The model, and its EMA: the teacher's weights are the same memory.
        objective: Corrupts images.

    Attributes:
        teacher: A copy of the model whose parameters are the EMA's tensors.
        blocks: The teacher's blocks, to be compiled like the model's.
    """

    def __init__(self, config: Config, state: TrainingState, objective: Objective) -> None:
        self.block, self.offset = teacher_block(config), config.train.teacher_offset
        self.objective, self.form = objective, config.train.align_loss
        self.teacher = copy.deepcopy(state.model).eval().requires_grad_(False)
        for parameter, average in zip(self.teacher.parameters(), state.ema, strict=True):
            parameter.data = average
        if self.teacher.stack.fuse is None:  # a fused span may end after the block
            self.teacher.stack.blocks = self.teacher.stack.blocks[: self.block + 1]
        self.blocks = self.teacher.stack.blocks

    def __call__(
        self,
        output: Output,
        x0: Tensor,
        noise: Tensor,
        time: Tensor,
        conditions: dict[str, Any],
        draws: Draws,
    ) -> Tensor:
        """Return the alignment loss of a forward pass.

        Args:
            output: Of the student, with its projected tokens.
            x0: Clean samples `(B, C, H, W)`.
            noise: The student's noise, likewise.
            time: The student's native times `(B,)`.
            conditions: The student's labels or text, some dropped.
            draws: The stream `teacher` is the time offset.
        """
        assert output.aligned is not None and output.aligned_layout is not None, "the projector"
        offset = self.offset * draws.uniform("teacher", 1)[:, 0]
        features = self.features(x0, noise, self.objective.less_noisy(time, offset), conditions)
        ids = output.aligned_layout.ids
        distance = alignment_loss(output.aligned.float(), features.float(), ids, self.form)
        return 1 + distance if self.form == "cosine" else distance

    @torch.no_grad()
    def features(
        self, x0: Tensor, noise: Tensor, time: Tensor, conditions: dict[str, Any]
    ) -> Tensor:
        """Return the teacher's grid tokens after its block, `(B, N, D)`, at native times `(B,)`."""
        teacher = self.teacher
        noisy = self.objective.corrupt(x0, noise, time)
        inputs = self.objective.scale_input(noisy, time).to(teacher.dtype)
        network_time = self.objective.model_time(time)
        tokens, c = teacher.embed(inputs, network_time, **conditions)
        modulation = teacher.modulate(c)
        stack_output = teacher.stack(tokens, modulation, teacher.layout(), taps=(self.block,))
        return stack_output.taps[self.block][:, teacher.prefix :]
