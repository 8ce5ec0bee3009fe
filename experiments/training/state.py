"""The state of a training run: weights, EMA, optimizer, counters; saved, loaded, initialised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backbones import Backbone
from experiments.config.identity import with_paths_replaced
from experiments.config.parent import split
from experiments.config.schema import Config
from experiments.evaluation.trained_model import load_model
from experiments.options.training import TrainOptions
from experiments.runtime import checkpoint_files
from experiments.runtime.checkpoint_files import CheckpointError
from experiments.runtime.nested import differing
from experiments.training.data_digest import check_same_data
from experiments.training.optimizer import create_optimizers, moment_names
from routing.errors import UserError, require
from routing.rng import widest

# Attributes in a checkpoint's `state.json`; the number of roll-backs is called `salt` there.
_COUNTERS = {
    "salt": "rollbacks",
    "seconds": "seconds",
    "macs": "macs",
    "mean_loss": "mean_loss",
    "spikes": "spikes",
}


class Tally:
    """Sums of steps since the last line of metrics, and counts of non-finite ones; on the device.

    Attributes:
        values: All five, `(5,)`, as a checkpoint holds them; the others are views of it.
        loss: Sum of the finite losses since the last line.
        grad_norm: Sum of their gradient norms.
        finite_steps: How many they are.
        bad_steps: Non-finite steps of the whole run.
        bad_streak: Non-finite steps in a row, up to the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(5, dtype=widest(device), device=device)
        self.loss, self.grad_norm, self.finite_steps = self.values[:3].unbind()
        self.bad_steps, self.bad_streak = self.values[3:].unbind()

    def reset_sums(self) -> None:
        """Start the sums of the next line of metrics."""
        self.values[:3] = 0


class TrainingState:
    """Everything that a checkpoint holds.

    Args:
        model: The network, on its device.
        train: Optimizer options.
        info: Description of the data set (`describe_data`), which is stored with the weights.

    Attributes:
        data_digest: Digest of the content of the data's files (`experiments.runtime.digest`).
        params: The model's parameters; `names` are theirs.
        ema: Exponential moving average of each parameter.
        optimizers: AdamW, then Muon for the blocks' matrices where `train.optimizer=muon`.
        step: Optimizer steps done.
        rollbacks: Returns to a checkpoint after non-finite steps; each has other random numbers.
        seconds: Training time, without evaluations.
        macs: Multiply-accumulates of all forward passes.
        mean_loss: Running mean of the loss, against which spikes are detected.
        spikes: Loss spikes so far.
        tally: Losses and non-finite steps, summed on the device.
    """

    def __init__(self, model: Backbone, train: TrainOptions, info: dict[str, Any]) -> None:
        self.model, self.info = model, info
        self.data_digest = ""
        self.names: list[str] = []
        self.params: list[Tensor] = []
        self.ema: list[Tensor] = []
        for name, parameter in model.named_parameters():
            self.names.append(name)
            self.params.append(parameter)
            self.ema.append(parameter.detach().clone())
        self.optimizers = create_optimizers(model, train)
        self._optimizer_of: dict[Tensor, torch.optim.Optimizer] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                self._optimizer_of.update((parameter, optimizer) for parameter in group["params"])
        self.step = 0
        self.rollbacks = 0
        self.seconds = 0.0
        self.macs = 0.0
        self.mean_loss: float | None = None
        self.spikes = 0
        self.tally = Tally(self.params[0].device)

    def moments(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer's tensors of one parameter by name, to read and write in place."""
        return self._optimizer_of[parameter].state[parameter]

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[Backbone]:
        """Temporarily swap in the EMA weights, in eval mode."""
        trained = [p.detach().clone() for p in self.params]
        try:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.ema)
            self.model.eval()
            yield self.model
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.params, trained)
            self.model.train()

    def ema_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with the EMA in place of the parameters."""
        weights = dict(self.model.state_dict())
        weights.update(zip(self.names, self.ema, strict=True))
        return weights

    def save(self, folder: Path, config: Config) -> None:
        """Write the checkpoint of this step into the run folder."""
        tensors: dict[str, Tensor] = {"tally": self.tally.values, "rng": torch.get_rng_state()}
        for name, parameter, average in zip(self.names, self.params, self.ema, strict=True):
            tensors[f"model.{name}"] = parameter
            tensors[f"ema.{name}"] = average
            for key, moment in self.moments(parameter).items():
                tensors[f"optim.{key}.{name}"] = moment
        state: dict[str, Any] = {
            "step": self.step,
            "config": config.to_dict(),
            "hashed": config.hashed,
            "data_digest": self.data_digest,
            "model": self.model.config,
            "data": self.info,
        }
        for key, attribute in _COUNTERS.items():
            state[key] = getattr(self, attribute)
        checkpoint_files.write(
            folder,
            self.step,
            tensors,
            state,
            keep=config.train.keep,
            keep_every=config.train.keep_every,
            streak=int(self.tally.bad_streak),
        )

    def load(self, path: Path, config: Config) -> None:
        """Load model, EMA, optimizer, counters and RNG state from a checkpoint folder.

        Raises:
            CheckpointError: It belongs to another configuration or to other data, or lacks a part
                of the state.
        """
        tensors, state = checkpoint_files.read(path)
        try:
            saved = with_paths_replaced(state["hashed"], config, config.hashed)
            self._check_config(path, saved, config.hashed)
            check_same_data(config, path, state.get("data_digest"), self.data_digest)
            self._restore(tensors, state)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(
                f"{path} does not hold what this run saves ({reason}): it was edited, or written "
                "by another version; move that folder away to resume from the one before it"
            ) from error

    def _check_config(self, path: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
        differences = []
        for key, (saved_value, value) in differing(saved, asked).items():
            differences.append(f"{key} (saved {saved_value!r}, asked {value!r})")
        require(
            not differences,
            f"{path} was written by another configuration: {'; '.join(differences)}; "
            "move that folder away or set paths.runs elsewhere",
            CheckpointError,
        )

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter, average in zip(self.names, self.params, self.ema, strict=True):
                parameter.copy_(tensors[f"model.{name}"])
                average.copy_(tensors[f"ema.{name}"])
                self._restore_moments(name, parameter, tensors)
        self.tally.values.copy_(tensors["tally"])
        torch.set_rng_state(tensors["rng"])
        self.step = int(state["step"])
        for key, attribute in _COUNTERS.items():
            setattr(self, attribute, state[key])

    def _restore_moments(self, name: str, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        """Load the optimizer's state of one parameter; in place: CUDA graphs refer to it."""
        moments = self.moments(parameter)
        for key in moment_names(self._optimizer_of[parameter]):
            saved = tensors.get(f"optim.{key}.{name}")
            if key not in moments and saved is not None:
                moments[key] = saved.to(parameter.device)
            elif key in moments and saved is not None:
                moments[key].copy_(saved)
            elif key in moments:  # the parameter had no gradient yet
                moments[key].zero_()

    def start_from(self, config: Config, say: Callable[[str], None]) -> None:
        """Load another run's EMA weights into this fresh run (`init=RUN[@STEP]`).

        Raises:
            UserError: The weights do not fit this run's model.
        """
        source = str(config.init)
        path, step = split(source)
        parent = load_model(path, step, device="cpu")
        # REPA's projector serves training alone: the child has its own, or none.
        own = {k: v for k, v in self.model.state_dict().items() if k.startswith("align.")}
        weights = own | parent.model.state_dict()
        dropped = [key for key in weights if key.startswith("align.") and key not in own]
        for key in dropped:
            del weights[key]
        if dropped:
            say(f"init: {len(dropped)} weights of REPA's projector are left behind")
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:  # names the weights and both shapes
            raise UserError(
                f"init={source}: {parent.config.backbone.name}-{parent.config.size} does not "
                f"fit {config.backbone.name}-{config.size}: {' '.join(str(error).split())}; "
                "give both the same backbone, size, data and learned parts"
            ) from None
        for average, parameter in zip(self.ema, self.params, strict=True):
            average.copy_(parameter.detach())
