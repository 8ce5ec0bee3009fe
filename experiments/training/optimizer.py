"""The optimizers of a run: AdamW, or Muon for the blocks' matrices and AdamW for the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backbones.layers import Block
from backbones.long_skips import LongSkipBlock
from experiments.options.training import TrainOptions


def muon_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that Muon trains: the weights of linear layers in blocks.

    Muon orthogonalises the update of a matrix that maps activations to activations. So it takes
    the weight of every `nn.Linear` inside a block, and of the layers that join long skips to the
    stream. AdamW takes what is no such map (biases, norms, token-shift mixes, convolutions, decays,
    though some of them are 2-D tensors) and what is outside the blocks: embeddings, the modulation
    of adaLN and the head, which start at zero, SPRINT's fusion and the projector of REPA and SRA.
    """
    matrices = set()
    for block in model.modules():
        if isinstance(block, Block | LongSkipBlock):
            for layer in block.modules():
                if isinstance(layer, nn.Linear):
                    matrices.add(id(layer.weight))
    return matrices


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that skips a step by `found_inf`, and whose rate may be on the device.

    torch's own reads its rate on the CPU and has no skipping. So it runs here on zeroed weights
    with a rate of 1, which leaves minus the orthogonalised update in them; the rest is one line of
    device operations, which a CUDA graph can record:
    `weights = (1 - lr weight_decay) weights + lr update`.

    Attributes:
        found_inf: 1 where gradients are not finite: weights and momentum then stay as they are.
    """

    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, unless `found_inf` is 1."""
        assert closure is None, "gradients are accumulated beforehand"
        bad = self.found_inf > 0
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            momenta = [self.state[weight].get("momentum_buffer") for weight in weights]
            old_weights = [weight.clone() for weight in weights]
            old_momenta = [None if momentum is None else momentum.clone() for momentum in momenta]
            rate, decay = group["lr"], group["weight_decay"]
            torch._foreach_zero_(weights)
            group.update(lr=1.0, weight_decay=0.0)
            try:
                self._orthogonalise(group)
            finally:
                group.update(lr=rate, weight_decay=decay)
            for weight, old, momentum in zip(weights, old_weights, old_momenta, strict=True):
                weight.copy_(torch.where(bad, old, old * (1 - rate * decay) + rate * weight))
                buffer = self.state[weight]["momentum_buffer"]
                buffer.copy_(torch.where(bad, 0.0 if momentum is None else momentum, buffer))

    def _orthogonalise(self, group: dict[str, Any]) -> None:
        """Run torch's step on one group alone."""
        groups = self.param_groups
        self.param_groups = [group]
        try:
            super().step()
        finally:
            self.param_groups = groups


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` without its guards against compilers, which import torch's: 2 s."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def create_optimizers(model: nn.Module, train: TrainOptions) -> list[torch.optim.Optimizer]:
    """Return AdamW and, with `train.optimizer=muon`, Muon for the matrices of the blocks.

    Each group has its `peak_lr`, of which the schedule makes the rate of a step.

    Args:
        model: The network, on its device.
        train: `optimizer`, rates, betas, weight decay.
    """
    matrices = muon_parameters(model) if train.optimizer == "muon" else set()
    muon_params: list[nn.Parameter] = []
    adamw_params: list[nn.Parameter] = []
    for parameter in model.parameters():
        (muon_params if id(parameter) in matrices else adamw_params).append(parameter)
    # Fused AdamW skips a step by `found_inf` on the device: the weights are safe without a sync.
    adamw = AdamW(
        adamw_params,
        lr=train.lr,
        betas=(train.betas[0], train.betas[1]),
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=True,
    )
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if muon_params:
        # Updates as large as AdamW's (Moonshot's 0.2 sqrt(max(rows, columns))): the same rate is a
        # sensible start for both.
        muon = Muon(
            muon_params,
            lr=train.lr if train.muon_lr is None else train.muon_lr,
            momentum=train.muon_momentum,
            weight_decay=train.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def moment_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors that an optimizer keeps for each parameter."""
    if isinstance(optimizer, Muon):
        return ("momentum_buffer",)
    return ("step", "exp_avg", "exp_avg_sq")


def move_rates(optimizers: list[torch.optim.Optimizer], device: torch.device) -> None:
    """Keep the learning rates on the device, where a CUDA graph reads them."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["capturable"] = device.type == "cuda"
            group["lr"] = torch.as_tensor(group["lr"], device=device)
