"""What `experiments/evaluate.py` writes: records of scores, and reference statistics.

A record is one JSON file per evaluation, named after a hash of its settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.config.removed_keys import former_defaults
from experiments.evaluation.collect import collect
from experiments.evaluation.features import create_features
from experiments.evaluation.reference import save_reference
from experiments.evaluation.small_networks import checksum
from experiments.options.evaluation import EvalOptions, MetricError, Score, measurable
from experiments.runtime.console import Console
from experiments.runtime.files import atomic_write, sha256
from experiments.runtime.processes import world
from routing.errors import require

#: Flags that have the name of an evaluation option.
EVAL_FLAGS = (
    "samples",
    "seed",
    "metrics",
    "features",
    "reference",
    "batch",
    "inception_weights",
    "dinov2_weights",
)
#: Flags of sampling from a run.
SAMPLING_FLAGS = (
    "step",
    "weights",
    "keep_samples",
    "batch",
    "guidance",
    "sampler",
    "steps",
    "seed",
    "write_samples",
)


@dataclasses.dataclass(frozen=True)
class Record:
    """The file of an evaluation, and the settings that it is named after."""

    path: Path
    settings: dict[str, Any]

    @classmethod
    def create(
        cls, folder: Path, title: str, settings: Mapping[str, Any], options: EvalOptions
    ) -> Record:
        """Return the record of an evaluation; nothing is written yet."""
        settings = {**settings, "eval": dict(vars(options))}
        if options.reference is not None:
            reference = Path(options.reference).expanduser()
            if reference.is_file():  # another file of this name is another reference
                settings["reference"] = sha256(reference)
        text = json.dumps(settings, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return cls(folder / f"{title}-{digest}.json", settings)

    def write(self, scores: Sequence[Score], console: Console) -> None:
        """Write settings and scores; only the first process does."""
        if world()[0]:
            return
        content = {
            **self.settings,
            "time": time.time(),
            "scores": [score.to_dict() for score in scores],
        }
        atomic_write(self.path, json.dumps(content, indent=1, default=str) + "\n")
        console.say(f"record      {self.path}")


def sampling_settings(pipeline: Any) -> dict[str, Any]:
    """Return the settings of a record that say how the samples are made."""
    settings: dict[str, Any] = {
        "weights": checksum(pipeline.model),
        "guidance": dataclasses.asdict(pipeline.guidance.options),
        # Older records have the keys that were removed since.
        "sampler": dataclasses.asdict(pipeline.sampler.options) | former_defaults("sampler"),
    }
    if pipeline.weak is not None:
        settings["weaker"] = checksum(pipeline.weak)
    return settings


def print_scores(title: str, scores: Sequence[Score], console: Console) -> None:
    """Print a table of scores."""
    rows = [[score.metric, f"{score.value:.4g}", score.reference or "-"] for score in scores]
    sampling = ""
    if scores:
        sampling = f"{scores[0].guidance or ''} {scores[0].sampler or ''}".strip()
    console.table(f"{title}  {sampling}".rstrip(), rows, ["score", "value", "against"])


def refuse_flags(
    args: argparse.Namespace, names: Iterable[str], reason: str, overrides: Sequence[str] = ()
) -> None:
    """Refuse flags and overrides that were given but have no effect here."""
    given_flags = []
    for name in names:
        if getattr(args, name) is not None:
            given_flags.append(f"--{name.replace('_', '-')}")
    given_flags += overrides
    if given_flags:
        raise MetricError(f"{given_flags[0]}{reason}; leave it out")


def write_reference(
    args: argparse.Namespace,
    options: EvalOptions,
    dataset: Any,
    cache: Path,
    images: Any,
    title: str,
    device: Any,
    console: Console,
) -> int:
    """Write the statistics of real images in one feature network; return the exit code."""
    refuse_flags(args, ["metrics", "reference", "out"], ": --write-reference scores nothing")
    require(
        options.features and (len(options.features) == 1 or not args.features),
        "--write-reference writes one kind of features; give one --features",
        MetricError,
    )
    path = args.write_reference
    require(
        path.suffix == ".npz", f"--write-reference {path}: the name must end in .npz", MetricError
    )
    name = options.features[0]
    features = create_features(name, options, cache=cache, dataset=dataset, device=device)
    statistics = ["moments", "rows"]
    if measurable("sfid", name):
        statistics.append("spatial")
    collected = collect(features, images, statistics)
    if not world()[0]:
        save_reference(path, features, collected, title)
    console.say(f"reference   {path}  ({collected['n']} images, {features.name})")
    return 0
