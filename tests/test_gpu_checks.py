"""What scripts/gpu_check.sh does without a GPU: how it runs checks, and how it reads what the system's tools print."""

import os
import re
import select
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
sys.path += [str(REPOSITORY / "scripts"), str(REPOSITORY / "benchmarks")]

from gpu_checks import __main__ as program  # noqa: E402
from gpu_checks import machine, memory, nccl_log, placement, report, steps, suites, variants  # noqa: E402
from gpu_checks.checks import CHECKS, Check  # noqa: E402
from gpu_checks.outcome import Outcome, outcome_of  # noqa: E402
from gpu_checks.ranks import on_ranks  # noqa: E402
from gpu_checks.runner import Call, call_all  # noqa: E402

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

# Processes run these functions.
FAKES = """
import atexit, os, signal, subprocess
from gpu_checks.outcome import Failed, NotPossible

def passes(*arguments): return " and ".join(arguments) or "all well"
def saves():
    for name in ("saved-1", "nccl-1"):
        os.mkdir(os.path.join(os.environ["TMPDIR"], name))
def of_rank(): return int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
def sum_of_ranks():
    import torch
    from gpu_checks import ranks
    ranks.connect("gloo")
    number = torch.tensor(int(os.environ["RANK"]) + 1)
    torch.distributed.all_reduce(number)
    torch.distributed.destroy_process_group()
    return int(number)
def fails(): raise Failed("it is too slow")
def is_missing(): raise NotPossible("no wheel")
def has_a_bug(): return {}["key"]
def hangs():
    print("waiting for the device", flush=True)
    signal.pause()
def dies(): os.kill(os.getpid(), signal.SIGSEGV)
def cannot_exit(): atexit.register(os._exit, 3)
def hangs_at_exit():
    atexit.register(signal.pause)
    return "all well"
def leaves_a_process():
    child = subprocess.Popen(["sleep", "100000"], start_new_session=True)
    return child.pid
"""


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fakes.py").write_text(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def called(function: str, folder: Path, *arguments: str, limit_s: float = 600.0) -> Outcome:
    return call_all([Call(f"fakes:{function}", arguments)], limit_s, folder / "calls")[0]


def alive(pid: int) -> bool:
    """True if a process does not end soon. After a kill, its environment is gone a moment before it has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    ended, _, _ = select.select([process], [], [], 10)
    os.close(process)
    return not ended


# -- running ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("passes", "passed: all well"),
        ("fails", "failed: it is too slow"),
        ("is_missing", "not possible here: no wheel"),
        ("has_a_bug", "failed: KeyError: 'key'"),
        ("is_not_there", "failed: AttributeError: module 'fakes' has no attribute 'is_not_there'"),
    ],
)
def test_the_outcome_of_a_check(function: str, line: str, tmp_path: Path) -> None:
    assert called(function, tmp_path).line == line


def test_arguments_reach_the_function(tmp_path: Path) -> None:
    assert called("passes", tmp_path, "one", "two").found == "one and two"


@pytest.mark.full
def test_a_check_that_hangs_is_killed_and_says_where_it_was(tmp_path: Path) -> None:
    calls = [Call("fakes:hangs"), Call("fakes:hangs_at_exit")]
    before, at_exit = call_all(calls, 15.0, tmp_path / "calls")
    assert before.status == at_exit.status == "failed"
    assert re.search(r"has not ended after \d+ s; last words: 'waiting for the device'", before.found)
    assert at_exit.found.startswith("after its last line, the process has not ended after ")


def test_a_check_that_dies_has_failed(tmp_path: Path) -> None:
    assert "was ended by SIGSEGV" in called("dies", tmp_path).line


def test_a_check_that_cannot_exit_has_failed(tmp_path: Path) -> None:
    assert called("cannot_exit", tmp_path).line.startswith("failed: after its last line, the process ended with status")


def test_no_process_of_a_check_is_left(tmp_path: Path) -> None:
    """Not even one with a session of its own, whose parent is dead."""
    outcome = called("leaves_a_process", tmp_path)
    assert outcome.status == "passed"
    assert not alive(outcome.found)


def test_processes_of_others_are_left(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100000"]) as other:
        called("leaves_a_process", tmp_path)
        assert other.poll() is None
        other.kill()


def test_tests_do_not_see_the_modules_of_checks(tmp_path: Path) -> None:
    """They find the package and `tests`, and nothing of scripts/ and benchmarks/."""
    names = "import importlib.util as u; print(*(bool(u.find_spec(n)) for n in ('fakes', 'gpu_checks', 'layouts')))"
    (tmp_path / "fakes.py").write_text(
        "import sys; from gpu_checks import runner; from pathlib import Path\n"
        f"def sees(log):\n runner.run(runner.Command((sys.executable, '-c', {names!r}), Path(log)), 600.0)\n"
        " return Path(log).read_text()\n"
    )
    assert called("sees", tmp_path, str(tmp_path / "log")).found.split() == ["True", "False", "False"]


def test_a_rank_that_fails_ends_the_others() -> None:
    calls = [Call("fakes:hangs"), Call("fakes:fails")]
    first, second = call_all(calls, 600.0, Path(os.environ["TMPDIR"]) / "calls")
    assert second == Outcome("failed", "it is too slow")
    assert "as another failed" in first.found


def test_ranks_know_who_they_are() -> None:
    assert on_ranks("fakes:of_rank", world=2, limit_s=600) == [[0, "2"], [1, "2"]]


def test_ranks_meet_at_the_store_of_the_check() -> None:
    assert on_ranks("fakes:sum_of_ranks", world=2, limit_s=600) == [3, 3]


@pytest.mark.parametrize(
    ("function", "line"), [("fails", "failed: it is too slow"), ("is_missing", "not possible here: no wheel")]
)
def test_what_a_rank_finds_is_what_the_check_finds(function: str, line: str) -> None:
    assert outcome_of(lambda: on_ranks(f"fakes:{function}", limit_s=600)).line == line


def test_the_program_runs_what_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    checks = tuple(
        Check(name, f"title of {name}", f"fakes:{name}", 600.0) for name in ("passes", "is_missing", "fails")
    )
    assert program.main(["is_missing", "passes"], checks) == 0
    printed = capsys.readouterr().out
    assert " 1. title of passes: passed: all well\n 2. title of is_missing: not possible here: no wheel\n" in printed
    assert "title of fails" not in printed


def test_one_failure_is_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    checks = tuple(Check(name, f"title of {name}", f"fakes:{name}", 600.0) for name in ("fails", "passes"))
    assert program.main([], checks) == 1
    printed = capsys.readouterr().out
    assert "\n| title of fails | failed | it is too slow |\n| title of passes | passed | all well |\n" in printed


def test_checkpoints_are_removed_and_logs_stay(tmp_path: Path) -> None:
    assert program.main([], (Check("saves", "saves", "fakes:saves", 600.0),)) == 0
    (folder,) = tmp_path.glob("gpu_check-*/saves")
    assert sorted(path.name for path in folder.iterdir()) == ["nccl-1", "own"]
    assert (folder / "own" / "0.log").exists()


def test_an_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["nothing"])
    assert "there is no check nothing: tests, graphs" in capsys.readouterr().err


# -- the checks -------------------------------------------------------------------------------------------


@NO_GPU
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_without_a_gpu_no_check_is_possible(check: Check) -> None:
    assert outcome_of(resolve_name(check.function)).line == "not possible here: no GPU"


def test_functions_that_run_on_ranks_are_there() -> None:
    sources = (REPOSITORY / "scripts" / "gpu_checks").glob("*.py")
    names = {name for path in sources for name in re.findall(r'"(gpu_checks\.\w+:\w+)"', path.read_text())}
    assert len(names) > len(CHECKS)
    for name in names:
        assert callable(resolve_name(name)), name


@NO_GPU
def test_the_script_says_that_there_is_no_gpu() -> None:
    script = REPOSITORY / "scripts" / "gpu_check.sh"
    ended = subprocess.run(["bash", script, sys.executable], capture_output=True, text=True)
    assert ended.returncode == 1
    assert f"gpu_check: torch in {sys.executable} sees no GPU" in ended.stderr


# -- what tools print -------------------------------------------------------------------------------------

# Fields and format as nvidia-smi's manual page describes them; the UUID is the one of its example.
GPUS = """\
0, GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, 00000000:18:00.0, NVIDIA H100 80GB HBM3, 570.86.15
1, GPU-00000000-d72c-4106-c12f-20bd9faed9f6, 00000001:AB:00.0, NVIDIA H100 80GB HBM3, 570.86.15
"""
FIRST, SECOND = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-00000000-d72c-4106-c12f-20bd9faed9f6"


def test_gpus_of_nvidia_smi() -> None:
    first, second = machine.parse_gpus(GPUS)
    assert first == machine.Gpu(0, FIRST, "0000:18:00.0", "NVIDIA H100 80GB HBM3", "570.86.15")
    assert (second.index, second.pci) == (1, "0001:ab:00.0")


def test_contexts_of_nvidia_smi() -> None:
    printed = f"{FIRST}, 4021\n{SECOND}, 4022\n{FIRST}, 4022\n{FIRST}, 77\n"
    found = machine.parse_contexts(printed)
    assert len(found) == 4
    own = {4021: FIRST, 4022: SECOND}
    assert machine.foreign(found, own) == [f"process 4022, whose GPU is {SECOND}, has a context on {FIRST}"]


@pytest.mark.parametrize("printed", ["", "No running processes found\n", "[Not Supported], [Not Supported]\n"])
def test_no_contexts_of_nvidia_smi(printed: str) -> None:
    assert machine.parse_contexts(printed) == []


@pytest.mark.parametrize(("written", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), (None, None)])
def test_the_numa_node_of_a_device(written: str | None, node: int | None, tmp_path: Path) -> None:
    """Documentation/ABI/testing/sysfs-bus-pci of the kernel: the node's number, or -1."""
    device = tmp_path / "0000:18:00.0"
    device.mkdir()
    if written is not None:
        (device / "numa_node").write_text(written)
    assert machine.numa_node("0000:18:00.0", tmp_path) == node


# Lines of the form that numa(7) describes.
NUMA_MAPS = """\
00400000 default file=/usr/bin/python3 mapped=100 N0=60 N1=40 kernelpagesize_kB=4
7f0000000000 bind:1 anon=131072 dirty=131072 active=0 N1=131072 kernelpagesize_kB=4
7f1000000000 default anon=16 dirty=16 huge N0=4 N1=12 kernelpagesize_kB=2048
7f2000000000 default
7ffc00000000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4
"""


def test_on_which_nodes_memory_is() -> None:
    found = machine.parse_numa_maps(NUMA_MAPS)
    assert found[0x400000] == {0: 60 << 12, 1: 40 << 12}
    assert found[0x7F0000000000] == {1: 512 << 20}
    assert found[0x7F1000000000] == {0: 8 << 20, 1: 24 << 20}
    assert 0x7F2000000000 not in found


def test_memory_that_has_grown() -> None:
    after = machine.parse_numa_maps(NUMA_MAPS)
    assert machine.grown({}, after) == {0: 8 << 20, 1: (512 + 24) << 20}
    assert machine.grown({0x7F0000000000: {1: 512 << 20}}, after) == {0: 8 << 20, 1: 24 << 20}
    assert machine.grown(after, after) == {}


def test_memory_of_this_process_is_on_some_node() -> None:
    outcome = outcome_of(machine.numa_maps)
    assert outcome.status == "not possible here" or sum(sum(nodes.values()) for nodes in outcome.found.values()) > 0


# Lines that NCCL has printed, of three versions: github.com/NVIDIA/nccl issues 629, 1814 and nccl-tests issue 252.
# The last two, of a group that was split, follow init.cc.
NCCL = """\
node:193027:193119 [7] NCCL INFO comm 0x7fdf08000d00 rank 15 nranks 16 cudaDev 7 busId e7000 - Init COMPLETE
node:193027:193112 [0] NCCL INFO comm 0x7fdf24000d00 rank 0 nranks 16 cudaDev 0 busId 25000 - Init COMPLETE
node:983:1261 [3] NCCL INFO Connected NVLS tree
node:984:1257 [4] NCCL INFO comm 0x557fe785f7a0 rank 36 nranks 64 cudaDev 4 nvmlDev 4 busId 9b000 commId 0x5ae7 - Init COMPLETE
node:980:1265 [0] NCCL INFO comm 0x55986b8b8560 rank 0 nranks 64 cudaDev 0 nvmlDev 0 busId 18000 commId 0x5ae7 - Init COMPLETE
node:27255:27906 [0] NCCL INFO ncclCommInitRank comm 0x555de9802860 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 42000 commId 0x996e - Init START
node:27255:27906 [0] NCCL INFO ncclCommInitRank comm 0x555de9802860 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 42000 commId 0x996e - Init COMPLETE
node:27255:27906 [0] NCCL INFO ncclCommSplit comm 0x5640 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 42000 parent 0x555d splitCount 1 color 1 key 0 - Init START
node:27255:27906 [0] NCCL INFO ncclCommSplit comm 0x5640 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 42000 parent 0x555d splitCount 1 color 1 key 0 - Init COMPLETE
"""  # noqa: E501


def test_communicators_in_nccls_logs(tmp_path: Path) -> None:
    assert nccl_log.communicators([NCCL]) == 4
    assert nccl_log.communicators([]) == 0
    for number, line in enumerate(NCCL.splitlines()):
        (tmp_path / f"nccl.host.{number}").write_text(line)
    assert nccl_log.communicators_in(tmp_path) == 4


# Summaries of the form that the manual of Compute Sanitizer shows.
SANITIZER = """\
========= COMPUTE-SANITIZER
31 passed in 40.11s
========= ERROR SUMMARY: 0 errors
"""


def test_the_summary_of_compute_sanitizer() -> None:
    assert variants.sanitizer_summary(SANITIZER) == "ERROR SUMMARY: 0 errors"
    race = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    assert variants.sanitizer_summary(race).startswith("RACECHECK SUMMARY: 1 hazard")
    assert variants.sanitizer_summary("") == "no summary"


def test_what_pytest_says_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(SANITIZER)
    assert variants.tests_in(log) == "31 passed in 40.11s"
    log.write_text("........\n30 passed, 1 skipped, 2 deselected in 60.00s (0:01:00)\n")
    assert variants.tests_in(log) == "30 passed, 1 skipped, 2 deselected in 60.00s"
    log.write_text("Fatal Python error\n\n")
    assert variants.tests_in(log) == "Fatal Python error"


# -- what is found ----------------------------------------------------------------------------------------


def test_the_slowest_rank_is_the_time_of_a_step() -> None:
    ranks = [
        {"alone": [[1.0, 2.0], [1.0, 1.0]], "beside": [[1.0, 1.0], [1.0, 1.0]]},
        {"alone": [[1.0, 1.0], [2.0, 1.0]], "beside": [[1.0, 3.0], [3.0, 1.0]]},
    ]
    text, ratio = steps.compared(ranks)
    assert ratio == 1.5
    assert text == (
        "steps alone 1500.0 ms, longest of each block 2000.0 2000.0, beside 2000.0 ms, longest of each block "
        "3000.0 3000.0, median of the longest 1.50 times"
    )


def test_one_long_step_of_a_noisy_machine_does_not_count() -> None:
    blocks = {"alone": [[1.0, 1.0]] * 5, "beside": [[1.0, 1.0]] * 4 + [[1.0, 9.0]]}
    assert steps.compared([blocks])[1] == 1.0


def test_steps_are_cut_into_blocks() -> None:
    assert steps.blocks_of([1.0] * 25) == [[1.0] * 10, [1.0] * 10]


def test_where_pages_are_in_words() -> None:
    assert placement.placed(1, "0001:ab:00.0", 1, {0: 1 << 20, 1: 3 << 20}) == (
        "GPU 1 (0001:ab:00.0) on node 1, pages node 0: 25%, node 1: 75%"
    )
    assert placement.placed(0, None, None, {0: 5}) == "GPU 0 (unknown address) on node unknown, pages node 0: 100%"


@pytest.mark.parametrize(("extra", "too_much"), [(300_000_000, False), (1_000_000_000, True)])
def test_how_much_memory_a_save_may_take(extra: int, too_much: bool) -> None:
    measured = {"weights": 10**9, "saves": {"lazy": 1000, "snapshot": extra}, "before": 10**10, "after": 10**10}
    assert memory.takes_too_much(measured) == too_much
    assert f"snapshot save {extra // 10**6} MB beside weights of 1000 MB" in memory.in_words(measured)


BENCHMARK: dict[str, Any] = {
    "pairs": 9,
    "results": {
        "1 GB": {
            "tensors": 1234,
            "stall_ms": 1.5,
            "worst_stall_ms": 2.0,
            "ours_gb_per_s": 24.0,
            "reference_gb_per_s": 25.0,
            "ratio": 0.96,
        }
    },
    "ways": {"the gather kernel": {"queued_ms": 1.0, "done_ms": 20.0, "gb_per_s": 20.48}},
}


def test_the_block_has_the_machine_and_the_tables() -> None:
    table = suites.tables(BENCHMARK)
    lines = report.block({"one | two": Outcome("failed", "a | b"), "speed": Outcome("passed", table)}).splitlines()
    assert re.fullmatch(r"### Seen on a GPU, \d{4}-\d\d-\d\d", lines[0])
    assert f"torch {torch.__version__}" in lines[2]
    assert "| one \\| two | failed | a \\| b |" in lines
    assert "| speed | passed | medians of 9 interleaved pairs: see below |" in lines
    assert "| 1 GB | 1,234 | 1.50 (2.00) | 24.0 | 25.0 | 0.96 |" in lines
    assert "| the gather kernel | 1.00 | 20.00 | 20.5 |" in lines
    assert Outcome("passed", table).line == "passed: medians of 9 interleaved pairs: see below"


# -- copies of torch's runtime ----------------------------------------------------------------------------


class Runtime:
    """A CUDA runtime that writes down what it is asked to copy."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.copied: list[tuple[int, int, int]] = []
        self.arguments = 0

    def _tell(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    cudaRuntimeGetVersion = cudaDriverGetVersion = _tell

    def cudaMemcpyAsync(self, to: Any, source: Any, nbytes: Any, kind: int, stream: Any) -> int:
        assert kind == 2, "cudaMemcpyDeviceToHost of driver_types.h"
        self.copied.append((to.value, source.value, nbytes.value))
        return 0

    def cudaMemcpyBatchAsync(self, to: Any, sources: Any, sizes: Any, count: Any, *others: Any) -> int:
        self.copied += list(zip(to, sources, sizes, strict=True))
        assert len(self.copied) == count.value
        self.arguments = 4 + len(others)
        return 0


@pytest.mark.parametrize(("version", "arguments"), [(12080, 9), (13000, 8)])
def test_other_ways_to_copy(version: int, arguments: int) -> None:
    from cuda_copies import Copies

    runtime: Any = Runtime(version)
    copies = Copies([10, 20], [30, 40], 5, 7, runtime)
    assert copies.has_batches
    copies.queue_each()
    each, runtime.copied = runtime.copied, []
    copies.queue_batch()
    assert runtime.copied == each == [(10, 30, 5), (20, 40, 5)]
    assert runtime.arguments == arguments
    copies.call_each()
    assert not Copies([10], [30], 5, 7, Runtime(12060)).has_batches  # type: ignore[arg-type]


def test_the_runtime_that_a_process_has_loaded() -> None:
    from cuda_copies import find_runtime

    maps = "7f00-7f10 r-xp 00000000 08:01 42   /venv/nvidia/cuda_runtime/lib/libcudart.so.12\n7f10-7f20 rw-p 0 0 0\n"
    assert find_runtime(maps) == "/venv/nvidia/cuda_runtime/lib/libcudart.so.12"
    assert find_runtime("7f00-7f10 r-xp 00000000 08:01 42   /usr/lib/libc.so.6\n") is None
