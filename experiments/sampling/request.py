"""What a user asks to sample, read from the command line (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.diffusion.diffusion_options import DiffusionError, options_of
from routing.errors import suggest
from routing.parsing import Malformed, yaml_of

#: Groups of a run's configuration that may be changed for sampling: `guidance.scale=2`.
GROUPS = ("sampler", "guidance", "data")
#: Flags that mean such a key.
FLAGS = {"steps": "sampler.steps", "scale": "guidance.scale"}
FLAGS |= {"sampler": "sampler.name", "guidance": "guidance.name"}


# Ten million seeds are 80 MB, and twenty days of images.
_MOST = 10_000_000


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63


def parse_numbers(text: str, key: str) -> list[int]:
    """Read `3`, `0-63` or `0-9,20,30-31` as numbers in that order."""
    numbers: list[int] = []
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise DiffusionError(
                f"{key} {text}: numbers such as 3,7 or ranges such as 0-63, all below 2^63"
            )
        if dash and int(last) < int(first):
            raise DiffusionError(f"{key} {text}: {part} counts down; try {last}-{first}")
        if len(numbers) + int(last or first) - int(first) >= _MOST:
            raise DiffusionError(
                f"{key} {text}: more than {_MOST:,} at once; ask for them in several calls"
            )
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def parse_classes(text: str, num_classes: int, names: Sequence[str] = ()) -> list[int]:
    """Read class numbers, ranges or names, separated by commas; `all` is every class."""
    if not num_classes:
        raise DiffusionError("--classes: this model has no classes; leave it out")
    if text == "all":
        return list(range(num_classes))
    chosen: list[int] = []
    for part in (piece.strip() for piece in str(text).split(",")):
        if part in names:
            chosen.append(list(names).index(part))
        elif part[:1].isdigit():
            chosen += parse_numbers(part, "--classes")
        else:
            guess = suggest(part, names)
            some = ", ".join(list(names)[:10]) or f"0..{num_classes - 1}"
            raise DiffusionError(
                f"--classes {part}: no class of that name{guess or f'; there are {some}'}"
            )
    wrong = [number for number in chosen if number >= num_classes]
    if wrong:
        raise DiffusionError(
            f"--classes {wrong[0]}: this model has {num_classes} classes, 0..{num_classes - 1}"
        )
    return chosen


def parse_captions(text: str) -> list[str]:
    """Read captions separated by semicolons, or one per line from a `.txt` file."""
    if text.endswith(".txt"):
        if not Path(text).is_file():
            raise DiffusionError(f"--captions {text}: there is no such file")
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise DiffusionError(f"--captions {text}: expected text in UTF-8") from None
    else:
        lines = text.split(";")
    captions = [line.strip() for line in lines if line.strip()]
    if not captions:
        raise DiffusionError("--captions: give one or more, separated by semicolons")
    return captions


def parse_overrides(items: Sequence[str], **flags: Any) -> dict[str, dict[str, Any]]:
    """Read `guidance.scale=2` and the like into a mapping per group.

    `flags` are the values of some of `FLAGS`; None is not given.
    """
    found: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for item in items:
        key, equals, value = item.partition("=")
        group, dot, name = key.partition(".")
        if group not in GROUPS or not dot or not equals:
            hint = "" if group in GROUPS else suggest(group, GROUPS)
            if key in ("sampler", "guidance"):
                hint = f"; type --{key} {value}"
            raise DiffusionError(
                f"{item}: sampling can change {', '.join(f'{g}.KEY=VALUE' for g in GROUPS)}{hint}"
            )
        try:
            found[group][name] = yaml_of(value, item)
        except Malformed:
            found[group][name] = value  # a path, such as one that begins with a bracket
    for name, value in flags.items():
        group, _, key = FLAGS[name].partition(".")
        # A NaN is that key's too, though it equals nothing.
        if value is not None and found[group].setdefault(key, value) not in (value,):
            raise DiffusionError(
                f"--{name} {value} and {FLAGS[name]}={found[group][key]}: give one of the two"
            )
    return found


def chosen_options(
    kind: str, configured: Mapping[str, Any], name: str | None, changes: Mapping[str, Any]
) -> Any:
    """Return a group's options: the run's own, or those of `name` by default, with changes."""
    name = name or changes.get("name") or configured.get("name")
    same = name == configured.get("name")
    options = options_of(kind, {**(configured if same else {}), **changes, "name": name})
    if options.name == "none" and changes.get("scale") is not None and options.scale != 1:
        raise DiffusionError(f"scale {options.scale:g}: there is no guidance; add --guidance cfg")
    return options


@dataclass(frozen=True)
class Request:
    """The images to make, in order."""

    seeds: list[int]  # one per image
    # Class of each, or None where the seeds draw them or there are no classes
    labels: list[int] | None
    captions: list[str] | None  # caption of each, or None
    columns: int | None  # images in a row of the grid
    row_names: list[str] | None  # names of the grid's rows, if rows mean something
    names: list[str]  # file name of each image, without suffix


def plan_request(
    seeds: Sequence[int],
    classes: Sequence[int] | None,
    captions: Sequence[str] | None,
    class_names: Sequence[str] = (),
) -> Request:
    """Return every seed for every class or caption, one row of the grid for each of those."""
    for key, given in (("--seeds", seeds), ("--classes", classes or ())):
        if len({*given}) < len(given):
            raise DiffusionError(f"{key}: a number stands twice, and its images would share a name")
    if captions is not None:
        rows = [(f"caption{row:03d}_", text) for row, text in enumerate(captions)]
    else:
        known = dict(enumerate(class_names))
        rows = [(f"class{n:04d}_", known.get(n, str(n))) for n in classes or ()]
    starts = [start for start, _ in rows] or [""]
    return Request(
        seeds=list(seeds) * len(starts),
        labels=[n for n in classes or () for _ in seeds] or None,
        captions=[text for text in captions or () for _ in seeds] or None,
        columns=len(seeds) if rows else None,
        row_names=[name for _, name in rows] or None,
        names=[f"{start}seed{seed:06d}" for start in starts for seed in seeds],
    )
