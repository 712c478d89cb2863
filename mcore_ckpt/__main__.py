"""Runs `mcore-ckpt` as `python -m mcore_ckpt`, for machines whose PATH lacks the folder of scripts."""

import sys

from mcore_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
