"""Lets `python -m headlong` do what the `headlong` command does."""

import sys

from headlong.cli.main import entrypoint

if __name__ == "__main__":
    sys.exit(entrypoint())
