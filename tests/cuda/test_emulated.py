"""Saves and loads of real trainings, with an emulated CUDA below mcore_ckpt (emulated_cuda.cpp).

Each test runs one or several cases of a program in processes of its own: program.py, other_states.py.
"""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
NO_HEADERS = 77

full = pytest.mark.full


@pytest.fixture(scope="module")
def native() -> Path:
    """The extension with the emulated CUDA."""
    built = REPOSITORY / "build" / "emulated" / "_native.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = [*(REPOSITORY / "csrc").iterdir(), *HERE.glob("*.cpp"), *(REPOSITORY / "build/native").rglob("*.o")]
        newest = max(path.stat().st_mtime for path in sources)
        if not built.exists() or built.stat().st_mtime < newest:
            script = REPOSITORY / "scripts" / "emulated_cuda.sh"
            made = subprocess.run(["bash", script, built], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if made.returncode == NO_HEADERS:
                pytest.skip(made.stdout.strip())
            assert made.returncode == 0, made.stdout
    return built


def _alone() -> dict[str, str]:
    """What a rank needs that no launcher has started."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


class Programs:
    def __init__(self, native: Path, folder: Path) -> None:
        self.native, self.folder = native, folder

    def run(
        self, *cases: str, ranks: int = 1, status: int = 0, program: str = "program.py", **environment: str
    ) -> None:
        """Runs the cases one after the other in a process of each rank."""
        with_native = {"EMULATED_NATIVE": str(self.native), "OMP_NUM_THREADS": "1"}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
        delay = {"EMULATED_DELAY_US": "20000"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *launcher, HERE / program, self.folder, *cases],
            env=os.environ | with_native | delay | _alone() | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
        )
        assert done.returncode == status, done.stdout[-5000:]


@pytest.fixture
def programs(native: Path, tmp_path: Path) -> Programs:
    return Programs(native, tmp_path)


def test_the_guards_of_lazy_saves_keep_them_whole(programs: Programs) -> None:
    programs.run("lazy", "lazy_without_guards", EMULATED_DELAY_US="200000", ROUNDS="1")


@full
def test_without_the_optimizer_weights_are_copied_before_a_save_returns(programs: Programs) -> None:
    programs.run("lazy_without_the_optimizer", EMULATED_DELAY_US="400000", ROUNDS="1")


def test_a_graph_can_be_captured_during_saves(programs: Programs) -> None:
    programs.run(
        "snapshot",
        "sync",
        "capture_while_memory_is_prepared",
        "capture_under_training_lazy",
        "capture_under_training_snapshot",
        "no_call_after_a_snapshot",
        "hold_in_a_capture",
    )


@full
def test_what_outlives_a_manager_and_what_it_needs(programs: Programs) -> None:
    programs.run(
        "tensors_outlive_the_manager",
        "what_is_prepared_is_used",
        "nothing_is_pinned_for_the_host",
        "kernels_are_queued_before_copies",
        "memory_is_pinned_in_pieces",
        "a_build_without_cuda_is_refused_at_once",
        "the_host_waits_with_a_deadline_before_it_reads_numbers",
        "sync_of_a_strided_tensor",  # last, because the model has one more buffer afterwards
    )


@full
def test_a_process_has_one_context(programs: Programs) -> None:
    programs.run("one_context", "a_call_may_come_from_any_thread_and_mode", EMULATED_GPU="3")


@full
def test_a_stuck_gpu_has_a_deadline(programs: Programs) -> None:
    programs.run("a_stuck_gpu_has_a_deadline")


@full
def test_an_exit_with_a_stuck_gpu_ends(programs: Programs) -> None:
    programs.run("exit_with_a_stuck_gpu", status=7)


@full
def test_a_fault_closes_everything(programs: Programs) -> None:
    programs.run("a_fault_closes_everything")


@full
@pytest.mark.parametrize("case", ["lazy", "snapshot", "sync"])
def test_twenty_rounds_of_two_ranks(programs: Programs, case: str) -> None:
    programs.run(case, ranks=2, EMULATED_DELAY_US="600000" if case == "lazy" else "100000", ROUNDS="20")


@full
def test_loads_and_exports_of_two_ranks(programs: Programs) -> None:
    programs.run(
        "what_is_prepared_is_used",  # also where the ranks' shares are uneven
        "broadcast",
        "fast_tier",
        "an_export_is_of_the_saved_state",
        "a_model_comes_from_rank_0",
        "one_context",
        ranks=2,
    )


@full
@pytest.mark.parametrize("case", ["blockwise", "delayed", "offload", "offload_overlap"])
def test_quantized_and_offloaded_states(programs: Programs, case: str) -> None:
    programs.run(case, ranks=2, program="other_states.py")
