"""From which code, machine and versions runs came."""

from collections import Counter
from pathlib import Path

import pandas as pd

from analysis.runs.run_files import read_environment

# Label of a line and the key in env.json.
_KEYS = {
    "commit": "git", "device": "device", "Python": "python", "torch": "torch", "threads": "threads",
}  # fmt: skip


def machine_lines(runs: pd.DataFrame) -> list[str]:
    """Return the number of runs, then a line per property of the machines that they ran on."""
    counts: dict[str, Counter[str]] = {label: Counter() for label in _KEYS}
    for path in runs["path"]:
        environment = read_environment(Path(str(path)))
        for label, key in _KEYS.items():
            value = environment.get(key)
            if value is not None:
                counts[label][str(value)] += 1
    lines = [f"{len(runs)} finished runs"]
    for label, values in counts.items():
        texts = [f"{value} ({count} runs)" for value, count in values.most_common()]
        text = next(iter(values)) if len(values) == 1 else ", ".join(texts)
        lines.append(f"{label}: {text or 'not recorded'}")
    return lines
