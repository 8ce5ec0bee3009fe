"""`python -m analysis`: see `analysis.command`."""

import sys

from analysis.command import main

if __name__ == "__main__":
    sys.exit(main())
