"""Ranks that take samples, save, and go on with other numbers of ranks. Started by tests/test_other_world.py:

python take_samples.py FOLDER STOPS

STOPS is JSON: for each stop its layout, where the checkpoint is ("-" for none), where it goes, and how many samples the
first data-parallel rank takes. Each other one takes one more than the one before it. Each stop writes the samples, by
data-parallel rank, to `<where it goes>.json` in FOLDER.
"""

import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from mcore_ckpt import SampleShare, ShardedPosition
from tests.distributed import forked_ranks
from tests.distributed.agreement import everywhere, gather
from tests.distributed.checkpointing import manager_of
from tests.distributed.training import Layout, build, parallel

FILES = [f"file_{number}" for number in range(12)]


def main(root: Path, source: str, target: str, count: int, layout: Layout) -> None:
    with parallel(layout):
        training = build(layout, seed=1)
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        share, files = SampleShare(rank, size), dict.fromkeys(FILES[rank::size], 0)
        if source != "-":
            manager = manager_of(training, root / source)
            extra = manager.load().extra_state
            manager.close()
            with everywhere():
                assert extra is not None
                assert extra["data"]["consumed"].for_rank() == 64
                share, files = extra["data"]["samples"].for_rank(), extra["data"]["files"].for_rank(rank, size)
        taken = list(islice(share.samples(), count + rank))
        files = {name: offset + 10 for name, offset in files.items()}
        manager = manager_of(training, root / target)
        positions = {
            "samples": ShardedPosition.of_share(share.after(len(taken))),
            "files": ShardedPosition.of_streams(files),
            "consumed": ShardedPosition.of_consumed(64),
        }
        manager.save(2, extra_state={"data": positions, "rank": dist.get_rank()}).wait()
        manager.close()
        by_rank = dict(gather((rank, (taken, files))))
        if dist.get_rank() == 0:
            (root / f"{target}.json").write_text(json.dumps(by_rank))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for layout, source, target, count in json.loads(sys.argv[2]):
        stop = partial(main, folder, source, target, count, Layout(**layout))
        codes = forked_ranks.run(layout["world"], lambda rank, stop=stop: stop(), sys.stdout)
        if any(codes):
            sys.exit(f"{source} -> {target} in {layout}: the ranks have ended with {codes}")
