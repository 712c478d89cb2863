"""Runs a start script of Megatron-Bridge that does not import this package.

torchrun ... -m mcore_ckpt.integrations.bridge scripts/training/run_recipe.py --recipe ... \
    checkpoint.custom_manager_class=mcore_ckpt.integrations.bridge.McoreCheckpointManager
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import mcore_ckpt.integrations.bridge  # noqa: F401  # registers itself with Bridge


def main() -> None:
    """Runs the script that the first argument names, with the arguments that follow."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m mcore_ckpt.integrations.bridge SCRIPT [ARGUMENT ...]")
    sys.argv = sys.argv[1:]
    # As `python SCRIPT` does, let the script import the modules in its folder.
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


main()
