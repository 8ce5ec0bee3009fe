"""`python -m analysis`: see `analysis.analysis_command`."""

import sys

from analysis.analysis_command import main

if __name__ == "__main__":
    sys.exit(main())
