"""`python -m analysis`: see `analysis.analysis_command`."""

from __future__ import annotations

import sys

from analysis.analysis_command import main

if __name__ == "__main__":
    sys.exit(main())
