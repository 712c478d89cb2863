"""Runs `mcore-ckpt` as `python -m mcore_ckpt`, where the folder of scripts is not on the PATH."""

import sys

from mcore_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
