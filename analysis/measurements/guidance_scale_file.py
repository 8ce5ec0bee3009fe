"""The stored guidance scale of one run: a JSON file with its rows, read without torch."""

from pathlib import Path
from typing import Any

from analysis.errors import AnalysisError
from analysis.runs.run_files import Damaged, read_json
from backbones.parsing import is_number

FORMAT = "tread-suite-guidance-scale/1"
FILE = "guidance_scale.json"
#: sigma / alpha over the data's standard deviation: t / (1 - t) at t = .6, .7, .8, .9 and .95 of
#: flow matching, from where a class begins to show to almost noise.
LEVELS = (1.5, 7 / 3, 4.0, 9.0, 19.0)
FORMS = ("plain", "instrumented")
LOSSES = ("loss_strong", "loss_weak", "square")
# Numbers of a row: both forms with their intervals, losses, and the squared difference.
NUMBERS = [f"{form}{end}" for form in FORMS for end in ("", "_low", "_high")] + [*LOSSES]
_FIELDS = {
    "run": str, "backbone": str, "size": str, "data": str, "route": str, "notes": list, "rows": list
}  # fmt: skip


def read_scales(path: Path) -> dict[str, Any]:
    """Read what was stored beside a run; raise `AnalysisError` where it is not such a file."""
    try:
        stored, reason = read_json(path), "other content"
    except Damaged as error:
        stored, reason = {}, str(error)
    if not _is_valid(stored):
        raise AnalysisError(
            f"{path} is not a {FORMAT} file ({reason}); make one with python -m analysis "
            "guidance-scale RUN"
        )
    return stored


def _is_valid(stored: dict[str, Any]) -> bool:
    if stored.get("format") != FORMAT:
        return False
    for key, kind in _FIELDS.items():
        if not isinstance(stored.get(key), kind):
            return False
    if not (is_number(stored.get("step")) and is_number(stored.get("seed"))):
        return False
    for row in stored["rows"]:
        if not isinstance(row, dict) or not isinstance(row.get("pair"), str):
            return False
        for name in ("level", *NUMBERS):
            if row.get(name) is not None and not is_number(row[name]):
                return False
    return True
