"""How well `mcore-ckpt bench` predicts what a trainer's saves then take.

    python benchmarks/predictions.py --ranks 1 --gigabytes 0.256 --pairs 5
    python benchmarks/predictions.py --ranks 1 --gigabytes 1 --pairs 5
    python benchmarks/predictions.py --ranks 1 --gigabytes 4 --pairs 5 [--megabytes 256] [--folder DIR] [--json]

Each pair measures the machine as the command does (with trial saves of --megabytes), predicts, and then makes an
asynchronous save, a synchronous one and a load with a CheckpointManager and a real training state. The ratio is
predicted / measured; measured is the median of --saves of each. The first save of each manager does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from measuring import Findings, common_arguments, each_rank, run, show
from ours import Ours
from references import bytes_of_all_ranks
from training_state import TrainingState, build, rank_tensors, shape_of_size

from mcore_ckpt.save.save_times import SaveReport
from mcore_ckpt.tools.examine.doctor.trial import trial_folder
from mcore_ckpt.tools.maintain.bench.predict import predict
from mcore_ckpt.tools.maintain.bench.size import SaveSize
from mcore_ckpt.tools.maintain.bench.speeds import measure as measure_speeds

NAMES = ("stall", "async_save", "sync_save", "load")


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--megabytes", type=float, default=256, help="size of the trial saves")
    parser.add_argument("--saves", type=int, default=3, help="saves and loads of each kind in a pair")
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    state = build(shape_of_size(arguments.gigabytes))
    managers = {is_async: _warm(arguments.folder / f"async-{is_async}", state, is_async) for is_async in (True, False)}
    nbytes = bytes_of_all_ranks(managers[True].report.nbytes)
    size = SaveSize.of_bytes(nbytes, dist.get_world_size(), len(rank_tensors(state)))
    pairs: list[dict[str, Any]] = []
    for number in range(arguments.pairs):
        predicted = _predicted(arguments, size)
        measured = _measured(arguments, managers)
        pairs.append({"predicted": predicted, "measured": measured})
        show(f"pair {number + 1} of {arguments.pairs}")
    findings.facts |= {"checkpoint_bytes": nbytes, "tensors": size.tensors, "pairs": pairs}
    if dist.get_rank() == 0:
        for name in NAMES:
            _judge(findings, name, [(each["predicted"][name], each["measured"][name]) for each in pairs])
    for ours in managers.values():
        ours.manager.close()


def _judge(findings: Findings, name: str, pairs: list[tuple[float, float]]) -> None:
    ratios = sorted(predicted / measured for predicted, measured in pairs)
    findings.facts[f"{name}: predicted / measured"] = {
        "median": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "median_predicted_s": statistics.median(predicted for predicted, _ in pairs),
        "median_measured_s": statistics.median(measured for _, measured in pairs),
    }
    if name != "load":
        findings.at_least(f"{name}: predicted / measured", statistics.median(ratios), 0.8)
        findings.at_most(f"{name}: predicted / measured", statistics.median(ratios), 1.2)


def _warm(folder: Path, state: TrainingState, is_async: bool) -> Ours:
    ours = Ours(folder, state, async_save=is_async)
    ours.save()
    ours.forget()
    return ours


def _predicted(arguments: argparse.Namespace, size: SaveSize) -> dict[str, Any]:
    """Rank 0 measures and predicts, as the command does, while the others wait."""
    dist.barrier()
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        with trial_folder(arguments.folder) as trial:
            speeds = measure_speeds(trial, int(arguments.megabytes * 10**6), dist.get_world_size())
        prediction = predict(size, speeds)
        found = {name: getattr(prediction, name).seconds for name in NAMES} | {"speeds": asdict(speeds)}
    dist.barrier()
    return found


def _measured(arguments: argparse.Namespace, managers: dict[bool, Ours]) -> dict[str, Any]:
    each = [_measured_once(managers) for _ in range(arguments.saves)]
    return {name: statistics.median(times[name] for times in each) for name in NAMES} | {"each": each}


def _measured_once(managers: dict[bool, Ours]) -> dict[str, Any]:
    stall, durable = _save(managers[True])
    managers[True].forget()
    _, sync = _save(managers[False])
    parts = {name: _seconds(managers[name == "async"].report) for name in ("async", "sync")}
    dist.barrier()
    begin = time.perf_counter()
    managers[False].load()
    load = max(each_rank(time.perf_counter() - begin))
    managers[False].forget()
    return {"stall": stall, "async_save": durable, "sync_save": sync, "load": load, "parts": parts}


def _seconds(report: SaveReport) -> dict[str, float]:
    return {name: value for name, value in asdict(report).items() if name.endswith("_s")}


def _save(ours: Ours) -> tuple[float, float]:
    """Returns the seconds until the save returned and until it was durable, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    ours.start()
    stall = time.perf_counter() - begin
    ours.finish()
    return max(each_rank(stall)), max(each_rank(ours.report.seconds))


if __name__ == "__main__":
    main()
