#!/usr/bin/env python
"""`mcore-ckpt merge` and `mcore-ckpt test` under the name, and with the flags, that verl's users type.

As verl's merger does (0.9), it writes into the folder `tmp` if --target_dir is not given.

python scripts/model_merger.py merge --backend megatron --local_dir ckpt/global_steps_100/actor --target_dir model
"""

import sys
from pathlib import Path

from mcore_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main(default_target=Path("tmp")))
