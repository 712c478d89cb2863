"""Run by torchrun (test_preempted_by_torchrun.py): trains until it is asked to stop, and says how it was stopped.

`preempted_by_torchrun.py ROOT RESULTS`: makes RESULTS/ready.N when the guard is entered on rank N, and stopped.N at the
end. RESULTS/stop is the trigger file.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.preemption import PreemptionGuard
from tests.distributed.training import Layout, build, parallel, train


def main() -> int:
    root, results = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    rank, layout = dist.get_rank(), Layout(2, precision="bf16")
    with parallel(layout):
        training = build(layout, seed=1)
        config = CheckpointConfig(timeout_s=60.0)
        manager = CheckpointManager(root, training.model, training.optimizer, training.scheduler, config=config)
        with PreemptionGuard(manager, trigger_file=results / "stop", deadline_s=30.0) as guard:
            (results / f"ready.{rank}").touch()
            for step in range(1, 100_000):
                train(training, step - 1, step)
                if guard.should_stop(step):
                    break
        manager.close()
    assert guard.stopped is not None
    (results / f"stopped.{rank}").write_text(json.dumps(vars(guard.stopped)))
    return guard.exit_status


sys.exit(main())
