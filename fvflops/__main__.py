"""`python -m fvflops`: the command line."""

import sys

from fvflops.cli import main

if __name__ == "__main__":
    sys.exit(main())
