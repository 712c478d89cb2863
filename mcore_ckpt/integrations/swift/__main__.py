"""Takes the place of ms-swift's command `megatron`: python -m mcore_ckpt.integrations.swift sft|pt|rlhf ...

NPROC_PER_NODE and the other variables of ms-swift, and a YAML file in place of options, work as in ms-swift.
"""

from __future__ import annotations

from swift.cli._megatron.main import ROUTE_MAPPING
from swift.cli.main import cli_main

_SCRIPTS = {name: f"mcore_ckpt.integrations.swift.{name}" for name in ("sft", "pt", "rlhf")}

if __name__ == "__main__":
    # `megatron export` stays ms-swift's own.
    cli_main({**ROUTE_MAPPING, **_SCRIPTS}, is_megatron=True)
