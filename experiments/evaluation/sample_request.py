"""Which images `experiments/sample.py` makes: seeds, classes and captions from the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from backbones.parsing import bytes_of
from experiments.options.roles import ConfigError
from routing.errors import require, suggest

MOST_COLUMNS, MOST_ROWS = 16, 20
# Images in the grid without classes or captions, which would be its rows.
_GRID_IMAGES = 100
# Ten million seeds take 80 MB, and twenty days of sampling.
_MOST_NUMBERS = 10_000_000


class SampleRequest(NamedTuple):
    """The images to make, in order."""

    seeds: list[int]  # one per image
    # Class of each; None if they are drawn from the seeds, or there are no classes
    labels: list[int] | None
    captions: list[str] | None  # caption of each, or None
    grid: set[int]  # the images in the grid: one row per class or caption, or the first hundred
    columns: int | None  # images in a row of the grid
    row_names: list[str] | None  # names of the grid's rows, where rows are classes or captions
    names: list[str]  # file name of each image, without suffix


def plan_request(
    seeds: Sequence[int],
    classes: Sequence[int] | None,
    captions: Sequence[str] | None,
    class_names: Sequence[str] = (),
) -> SampleRequest:
    """Return every seed for every class or caption, one row of the grid for each of those."""
    for flag, numbers in (("--seeds", seeds), ("--classes", classes or ())):
        require(
            len(set(numbers)) == len(numbers),
            f"{flag}: a number is given twice; expected each once, since it identifies an image",
            ConfigError,
        )
    if not classes and not captions:
        return SampleRequest(
            seeds=list(seeds),
            labels=None,
            captions=None,
            grid=set(range(_GRID_IMAGES)),
            columns=None,
            row_names=None,
            names=[f"seed{seed:06d}" for seed in seeds],
        )
    rows = _rows(classes, captions, class_names)
    columns = min(len(seeds), MOST_COLUMNS)
    labels: list[int] = []
    image_captions: list[str] = []
    names = []
    grid: set[int] = set()
    for row, (prefix, _) in enumerate(rows):
        names += [f"{prefix}seed{seed:06d}" for seed in seeds]
        if classes:
            labels += [classes[row]] * len(seeds)
        if captions:
            image_captions += [captions[row]] * len(seeds)
        if row < MOST_ROWS:
            first = row * len(seeds)
            grid.update(range(first, first + columns))
    return SampleRequest(
        seeds=list(seeds) * len(rows),
        labels=labels or None,
        captions=image_captions or None,
        grid=grid,
        columns=columns,
        row_names=[name for _, name in rows[:MOST_ROWS]],
        names=names,
    )


def _rows(
    classes: Sequence[int] | None, captions: Sequence[str] | None, class_names: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the prefix of file names and the name of every class or caption."""
    rows = []
    for number, caption in enumerate(captions or ()):
        rows.append((f"caption{number:03d}_", caption))
    for number in classes or ():
        name = class_names[number] if number < len(class_names) else str(number)
        rows.append((f"class{number:04d}_", name))
    return rows


# --- parsing --------------------------------------------------------------------------------------


def parse_numbers(text: str, flag: str) -> list[int]:
    """Parse `3`, `0-63` or `0-9,20,30-31` as numbers in that order."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        require(
            last >= first,
            f"{flag} {text}: expected numbers such as 3,7 or ranges such as 0-63, from the "
            "smaller to the larger number, all below 10^18",
            ConfigError,
        )
        require(
            len(numbers) + last - first < _MOST_NUMBERS,
            f"{flag} {text}: more than {_MOST_NUMBERS:,} at once; ask for them in several calls",
            ConfigError,
        )
        numbers += range(first, last + 1)
    return numbers


def parse_classes(text: str, num_classes: int, names: Sequence[str] = ()) -> list[int]:
    """Parse class names, numbers or ranges, separated by commas; `all` is every class.

    A name comes first: `all`, `3-5` or `a,b` is the class that is called so. Where a class is
    called by a number, as the folders 1 to 10, numbers and ranges are names too, not positions.
    """
    require(num_classes, "--classes: this model has no classes; leave it out", ConfigError)
    positions = {name: position for position, name in enumerate(names)}
    if text in positions:
        return [positions[text]]
    if text == "all":
        return list(range(num_classes))
    numbered = {int(name): position for name, position in positions.items() if _is_number(name)}
    is_called_by_number = bool(numbered)
    if not numbered:
        numbered = dict(enumerate(range(num_classes)))
    classes: list[int] = []
    for part in map(str.strip, text.split(",")):
        if part in positions:
            classes.append(positions[part])
            continue
        if not part[:1].isdigit():
            examples = ", ".join(list(names)[:10]) or f"0..{num_classes - 1}"
            hint = suggest(part, names) or f"; there are {examples}"
            raise ConfigError(f"--classes {part}: no class of that name{hint}")
        for number in parse_numbers(part, "--classes"):
            expected = f"this model has {num_classes} classes, 0..{num_classes - 1}"
            if is_called_by_number:
                expected = f"no class is called {number}; there are {', '.join(list(names)[:10])}"
            require(number in numbered, f"--classes {number}: {expected}", ConfigError)
            classes.append(numbered[number])
    return classes


def _is_number(name: str) -> bool:
    return re.fullmatch("[0-9]{1,18}", name) is not None


def parse_captions(text: str) -> list[str]:
    """Parse captions separated by semicolons, or one per line from a `.txt` file."""
    if text.endswith(".txt"):
        try:
            lines = bytes_of(Path(text)).decode("utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--captions {text}: expected text in UTF-8 ({error})") from None
    else:
        lines = text.split(";")
    captions = [line.strip() for line in lines if line.strip()]
    require(captions, "--captions: give one or more, separated by semicolons", ConfigError)
    return captions
