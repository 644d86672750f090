"""``fedfp8`` and ``python -m fedfp8``: the command line, or how to install it."""

import sys

__all__ = ["main"]


def main() -> None:
    from fedfp8.errors import MissingPackage, extra

    try:
        with extra("cli"):
            from fedfp8.cli import main as command
    except MissingPackage as error:
        sys.exit(f"error: {error}")
    command()


if __name__ == "__main__":
    main()
