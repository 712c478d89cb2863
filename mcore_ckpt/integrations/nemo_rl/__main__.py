"""Runs a start script of NeMo-RL with our workers.

uv run python -m mcore_ckpt.integrations.nemo_rl examples/run_grpo.py --config grpo_math_1B_megatron.yaml
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from mcore_ckpt.integrations.nemo_rl.driver import choose_worker, register
from mcore_ckpt.integrations.nemo_rl.driver_files import keep_driver_files


def main() -> None:
    """Runs the script that the first argument names, with the arguments that follow."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m mcore_ckpt.integrations.nemo_rl SCRIPT [ARGUMENT ...]")
    register()
    choose_worker()
    keep_driver_files()
    sys.argv = sys.argv[1:]
    # As `python SCRIPT` does, let the script import the modules in its folder.
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


main()
