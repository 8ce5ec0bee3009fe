"""The state of a training run: what it is made of, what a checkpoint holds, how it comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from experiments.data.sample_order import SampleOrder
from experiments.runtime import console as log
from experiments.training import build, checkpoint
from experiments.training.alignment import make_encoder
from experiments.training.routes import TrainingRoutes, run_cost
from routing.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from experiments.config.schema import Config
    from experiments.data.dataset import Batch


class State:
    """The parts of one run, and the state that a checkpoint holds.

    Args:
        config: What to train.
        accelerator: This run's processes.
        console: Where to print.
    """

    def __init__(self, config: Config, accelerator: Accelerator, console: log.Console) -> None:
        self.config, self.accelerator, self.console = config, accelerator, console
        self.device, self.folder = accelerator.device, config.folder
        self.dataset = build.make_dataset(config, self.device)
        self.info = build.describe_data(self.dataset)
        self.objective = build.make_objective(config)
        self.model = build.make_model(config, self.info).to(self.device)
        self.routes = TrainingRoutes(config, self.model.config)
        self.encode = None
        if config.train.encoder != "none":
            self.encode = make_encoder(config, self.dataset, self.model.grid, self.device)
        self.cost = run_cost(config, self.model.config)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.params = [p for _, p in self.model.named_parameters()]
        self.ema = [p.detach().clone() for p in self.params]
        # Fused AdamW skips a step by `found_inf` on the device: no host sync to protect the
        # weights.
        self.optimizer = torch.optim.AdamW(
            self.params,
            lr=config.train.lr,
            betas=(config.train.betas[0], config.train.betas[1]),
            eps=config.train.eps,
            weight_decay=config.train.weight_decay,
            fused=True,
        )
        self.order = SampleOrder(config.seed, self.dataset.size)
        self.step, self.salt = 0, 0
        self.ahead: Iterator[Batch] | None = None
        self.seconds, self.macs, self.spikes = 0.0, 0.0, 0
        self.mean_loss: float | None = None
        self.micro_batch = 0
        # Sums since the last log of loss, gradient norm and good steps; bad steps; bad in a row.
        self.tally = torch.zeros(5, dtype=torch.float64, device=self.device)
        self.net: Any = (
            accelerator.prepare_model(self.model) if accelerator.num_processes > 1 else self.model
        )
        if config.train.compile == "blocks":
            build.compile_blocks(self.model)

    def save(self) -> None:
        """Write a checkpoint (first process) and wait for it."""
        tensors = {f"model.{n}": p for n, p in zip(self.names, self.params, strict=True)}
        tensors |= {f"ema.{n}": p for n, p in zip(self.names, self.ema, strict=True)}
        for name, p in zip(self.names, self.params, strict=True):
            tensors |= {
                f"optim.{key}.{name}": value for key, value in self.optimizer.state[p].items()
            }
        tensors["tally"], tensors["rng"] = self.tally, torch.get_rng_state()
        state = {
            "step": self.step,
            "config": self.config.to_dict(),
            "hashed": self.config.hashed(),
            "model": self.model.config,
            "data": self.info,
            **{k: getattr(self, k) for k in ("salt", "seconds", "macs", "mean_loss", "spikes")},
        }
        if self.accelerator.is_main_process:
            train = self.config.train
            checkpoint.save(
                self.folder, self.step, tensors, state, keep=train.keep, keep_every=train.keep_every
            )
        self.accelerator.wait_for_everyone()

    def resume(self, up_to: int | None = None) -> bool:
        """Go on from the newest whole checkpoint; return whether there was one.

        Args:
            up_to: No later step than this one.

        Raises:
            CheckpointError: It belongs to another configuration; the message says what differs.
        """
        with self.accelerator.main_process_first():
            # The first process sets damaged checkpoints aside before the others look.
            found = checkpoint.newest(self.folder, self.console.say, up_to)
        if found is None:
            return False
        tensors, state = checkpoint.read(found)
        differs = checkpoint.difference(state["hashed"], self.config.hashed())
        if differs:
            raise checkpoint.CheckpointError(
                f"{found} was written by another configuration: {'; '.join(differs)}; "
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
        for key in ("salt", "seconds", "macs", "mean_loss", "spikes"):
            setattr(self, key, state[key])
        return True

    def start_from(self, source: str) -> None:
        """Load another run's EMA weights into this fresh run (`init=RUN[@STEP]`).

        Raises:
            UserError: The weights do not fit this model.
        """
        from experiments.config.parent import split

        path, step = split(source)
        parent = checkpoint.load_model(path, step, device="cpu")
        theirs, ours = parent.config.objective["name"], self.config.objective["name"]
        if theirs != ours:
            raise UserError(
                f"init={source}: trained with objective={theirs}, whose network predicts something "
                f"else than objective={ours} asks for; type objective={theirs}"
            )
        given, own = parent.model.state_dict(), self.model.state_dict()
        # REPA's projector serves training alone: the child has its own, or none.
        left = sorted(key for key in given if key.startswith("align.") and key not in own)
        if left:
            self.console.say(f"init: {len(left)} weights of REPA's projector are left behind")
        given = {key: value for key, value in given.items() if key not in left}
        given |= {k: v for k, v in own.items() if k.startswith("align.") and k not in given}
        wrong = [
            f"{key} ({_shape(given, key)} there, {_shape(own, key)} here)"
            for key in sorted(given.keys() | own.keys())
            if _shape(given, key) != _shape(own, key)
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UserError(
                f"init={source}: {parent.config.backbone['name']}-{parent.config.size} does not "
                f"fit {self.config.backbone['name']}-{self.config.size}: "
                f"{', '.join(wrong[:3])}{more}; give both the same backbone, size, data and "
                "learned parts"
            )
        self.model.load_state_dict(given)
        for average, p in zip(self.ema, self.params, strict=True):
            average.copy_(p.detach())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Any]:
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


def _shape(tensors: dict[str, Any], key: str) -> str:
    return "x".join(map(str, tensors[key].shape)) or "a number" if key in tensors else "not"
