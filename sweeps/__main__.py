"""`python -m sweeps`: see `sweeps.cli`."""

from __future__ import annotations

import sys

from sweeps.cli import main

if __name__ == "__main__":
    sys.exit(main())
