"""One rank's part of test_simulated_hosts.py: trains a step, and notes in its host's memory what it has seen."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt.ranks.hosts import this_host
from tests.distributed.training import Layout, build, parallel, train


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    layout = Layout(dist.get_world_size(), tp=2, global_batch=16, dropout=0.0)
    with parallel(layout):
        training = build(layout, seed=1)
        (step,) = train(training, 0, 1)
    Path(arguments["folder"], f"rank{rank}").write_text(f"{socket.gethostname()} {step.grad_norm}")
    dist.barrier()
    if arguments["then"] == "stay":
        time.sleep(600)
    seen = sorted(path.name for path in Path(arguments["folder"]).iterdir())
    return {"host": this_host(), "local": os.environ["LOCAL_RANK"], "grad_norm": step.grad_norm, "seen": seen}
