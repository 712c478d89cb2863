"""torchrun hands SIGTERM on to its ranks, and kills them later; a file stops them without it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.steps.listing import complete_steps

SCRIPT = Path(__file__).parent / "preempted_by_torchrun.py"
# For two processes that import megatron on a busy machine.
START_S = 200.0


# CI has preemptions of forked ranks (test_preemptions.py): here each rank imports megatron.
@pytest.mark.full
@pytest.mark.parametrize("how", ["a file", "SIGTERM"])
def test_ranks_of_torchrun_save_before_they_are_killed(how: str, tmp_path: Path) -> None:
    root, results = tmp_path / "root", tmp_path / "results"
    results.mkdir()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    launched = subprocess.Popen(
        [*torchrun, SCRIPT, root, results],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": _path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until = time.monotonic() + START_S
    while len(list(results.glob("ready.*"))) < 2 and launched.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    if how == "a file":
        (results / "stop").touch()
    else:
        launched.send_signal(signal.SIGTERM)
    output, _ = launched.communicate(timeout=START_S)
    stopped: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(results.glob("stopped.*"))]
    assert len(stopped) == 2, output
    assert stopped[0] == stopped[1]
    assert stopped[0]["saved"] == "durable"
    assert [each.step for each in complete_steps(root)] == [stopped[0]["step"]]
    if how == "a file":
        assert launched.returncode == 0, output
        assert not (results / "stop").exists()


def _path() -> str:
    return os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
