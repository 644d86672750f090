"""``python -m fedfp8``: the command line without its script on the PATH."""

from fedfp8.cli import main

if __name__ == "__main__":
    main()
