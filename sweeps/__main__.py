"""`python -m sweeps`: see `sweeps.sweeps_command`."""

import sys

from sweeps.sweeps_command import main

if __name__ == "__main__":
    sys.exit(main())
