"""``python -m fedfp8``: the command line without its script on the PATH."""

import sys

from fedfp8.cli import main

if __name__ == "__main__":
    sys.exit(main())
