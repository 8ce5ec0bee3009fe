"""What a checkpoint holds: weights, average, moments, counts; loaded, or taken from `init=`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backbones import Backbone
from experiments.config.parent import split
from experiments.config.schema import Config, TrainConfig
from experiments.options.fields import differing
from experiments.training import checkpoint
from routing.errors import UserError
from routing.rng import widest

# Attributes in a checkpoint's `state.json`; the number of roll-backs is called `salt` there.
_COUNTS = {"salt": "rollbacks"} | {k: k for k in ("seconds", "macs", "mean_loss", "spikes")}


class TrainingState:
    """The state of one run; `info`, what the data set says of itself, travels with the weights."""

    def __init__(self, model: Backbone, train: TrainConfig, info: dict[str, Any]) -> None:
        self.model, self.info = model, info
        self.names = [name for name, _ in model.named_parameters()]
        self.params = [p for _, p in model.named_parameters()]
        self.ema = [p.detach().clone() for p in self.params]
        # Fused AdamW skips a step by `found_inf` on the device: the weights are safe without a
        # sync.
        self.optimizer = torch.optim.AdamW(
            self.params,
            lr=train.lr,
            betas=(train.betas[0], train.betas[1]),
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,
        )
        self.step = 0  # optimizer steps done
        self.rollbacks = 0  # returns to a checkpoint after non-finite steps; each has other draws
        self.seconds = 0.0  # of training, scoring left out
        self.macs = 0.0  # multiply-accumulates of all forward passes
        self.mean_loss: float | None = None  # running mean, against which spikes show
        self.spikes = 0
        device = self.params[0].device
        # Sums since the last log of loss, gradient norm and good steps; bad steps; bad in a row
        self.tally = torch.zeros(5, dtype=widest(device), device=device)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Backbone]:
        """Give the model its EMA weights, in eval mode, inside the block."""
        held = [p.detach().clone() for p in self.params]
        try:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.ema)
            self.model.eval()
            yield self.model
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.params, held)
            self.model.train()

    def save(self, folder: Path, config: Config) -> None:
        """Write the checkpoint of this step into the run folder."""
        tensors: dict[str, Tensor] = {}
        for name, p, average in zip(self.names, self.params, self.ema, strict=True):
            tensors |= {f"model.{name}": p, f"ema.{name}": average}
            tensors |= {f"optim.{key}.{name}": v for key, v in self.optimizer.state[p].items()}
        tensors |= {"tally": self.tally, "rng": torch.get_rng_state()}
        state = {
            "step": self.step,
            "config": config.to_dict(),
            "hashed": config.hashed(),
            "model": self.model.config,
            "data": self.info,
            **{key: getattr(self, name) for key, name in _COUNTS.items()},
        }
        kept = {"keep": config.train.keep, "keep_every": config.train.keep_every}
        streak = int(self.tally[4])
        checkpoint.save(folder, self.step, tensors, state, **kept, streak=streak)

    def load(self, path: Path, hashed: dict[str, Any]) -> None:
        """Load weights, average, moments, counts and generator from a checkpoint folder.

        Raises:
            CheckpointError: It belongs to another configuration, or lacks what this run saves.
        """
        tensors, state = checkpoint.read(path)
        try:
            self._restore(path, tensors, state, hashed)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise checkpoint.CheckpointError(
                f"{path} does not hold what this run saves ({reason}): it was edited, or written "
                "by another version; move that folder away to resume from the one before it"
            ) from error

    def _restore(
        self, path: Path, tensors: dict[str, Tensor], state: dict[str, Any], hashed: dict[str, Any]
    ) -> None:
        if other := differing(state["hashed"], hashed):
            differs = (f"{key} (saved {a!r}, asked {b!r})" for key, (a, b) in other.items())
            raise checkpoint.CheckpointError(
                f"{path} was written by another configuration: {'; '.join(differs)}; "
                "move that folder away or set paths.runs elsewhere"
            )
        with torch.no_grad():
            for name, p, average in zip(self.names, self.params, self.ema, strict=True):
                p.copy_(tensors[f"model.{name}"])
                average.copy_(tensors[f"ema.{name}"])
                self.optimizer.state[p] = {
                    key: tensors[f"optim.{key}.{name}"].to(p.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"optim.{key}.{name}" in tensors
                }
        self.tally.copy_(tensors["tally"])
        torch.set_rng_state(tensors["rng"])
        self.step = int(state["step"])
        for key, name in _COUNTS.items():
            setattr(self, name, state[key])

    def start_from(self, config: Config, say: Callable[[str], None]) -> None:
        """Load another run's EMA weights into this fresh run (`init=RUN[@STEP]`)."""
        source = str(config.init)
        path, step = split(source)
        parent = checkpoint.load_model(path, step, device="cpu")
        given, own = parent.model.state_dict(), self.model.state_dict()
        # REPA's projector serves training alone: the child has its own, or none.
        left = sorted(key for key in given if key.startswith("align.") and key not in own)
        if left:
            say(f"init: {len(left)} weights of REPA's projector are left behind")
        given = {key: value for key, value in given.items() if key not in left}
        given |= {k: v for k, v in own.items() if k.startswith("align.") and k not in given}
        try:
            self.model.load_state_dict(given)
        except RuntimeError as error:  # which names the weights and both shapes
            raise UserError(
                f"init={source}: {parent.config.backbone['name']}-{parent.config.size} does not "
                f"fit {config.backbone['name']}-{config.size}: {' '.join(str(error).split())}; "
                "give both the same backbone, size, data and learned parts"
            ) from None
        for average, p in zip(self.ema, self.params, strict=True):
            average.copy_(p.detach())
