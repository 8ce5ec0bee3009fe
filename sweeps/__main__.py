"""`python -m sweeps`: see `sweeps.sweeps_command`."""

from __future__ import annotations

import sys

from sweeps.sweeps_command import main

if __name__ == "__main__":
    sys.exit(main())
