"""Draw the pictures of the documentation: python docs/pictures.py (`make docs` calls it)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from analysis.figures import scan_paths, selections  # noqa: E402
from experiments.runtime.files import atomic_write  # noqa: E402

IMAGES = Path(__file__).resolve().parent / "img"


def main() -> None:
    """Write every picture below `docs/img`."""
    IMAGES.mkdir(exist_ok=True)
    for name, plot in (("scans", scan_paths()), ("selections", selections())):
        atomic_write(IMAGES / f"{name}.png", plot.png(dpi=110))
        print(f"docs/img/{name}.png  {plot.caption}")


if __name__ == "__main__":
    main()
