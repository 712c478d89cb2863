import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mcore_ckpt.io import _native

HUGE_PAGE = 2 << 20


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, HUGE_PAGE + 1, 100 << 20])
@pytest.mark.parametrize("threads", [1, 4])
def test_memory_is_there_zeroed_and_writable(nbytes: int, threads: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer = _native.HostBuffer(nbytes, threads=threads)
    assert buffer.address % HUGE_PAGE == 0
    assert (buffer.nbytes, buffer.device, buffer.pinned_bytes) == (nbytes, None, 0)
    fetched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    assert data.data_ptr() == buffer.address
    assert data.numel() == nbytes
    assert not data.any()
    data.fill_(7)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert after - fetched < max(200, nbytes // 4096 // 10), "the pages were not there before"
    assert memoryview(buffer)[nbytes - 1] == 7
    assert before <= fetched


def test_memory_lives_as_long_as_what_was_made_of_it() -> None:
    view = memoryview(_native.HostBuffer(HUGE_PAGE))
    tensor = torch.frombuffer(_native.HostBuffer(HUGE_PAGE), dtype=torch.uint8)
    gc.collect()
    view[5] = 1
    tensor.fill_(3)
    assert view[5] == 1
    assert int(tensor.sum()) == 3 * HUGE_PAGE


def test_memory_is_given_back() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()

    before = mapped()
    for _ in range(20):
        _native.HostBuffer(64 << 20)
    assert mapped() - before < 128 << 20


@pytest.mark.parametrize("arguments", [{"nbytes": 0}, {"nbytes": 1, "threads": 0}])
def test_what_cannot_be_meant_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"0 bytes|at least 1"):
        _native.HostBuffer(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [1 << 62, (1 << 64) - 1])
def test_too_much_is_a_memory_error_that_says_how_much(nbytes: int) -> None:
    with pytest.raises(MemoryError, match=f"no {nbytes} bytes of host memory"):
        _native.HostBuffer(nbytes)


def test_a_limit_of_the_process_is_a_memory_error() -> None:
    script = """
import resource
from mcore_ckpt.io import _native
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    _native.HostBuffer(8 << 30)
except MemoryError as error:
    assert str(8 << 30) in str(error)
else:
    raise SystemExit("no error")
_native.HostBuffer(1 << 20)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_forked_child_has_its_own_copy() -> None:
    buffer = _native.HostBuffer(HUGE_PAGE)
    view = memoryview(buffer)
    child = os.fork()
    if child == 0:
        view[0] = 9
        os._exit(view[0] - 9)
    assert os.waitpid(child, 0)[1] == 0
    assert view[0] == 0


@pytest.mark.skipif(torch.cuda.is_available() and _native.built_with_cuda, reason="needs a machine without a GPU")
def test_without_a_gpu_pinning_is_refused() -> None:
    with pytest.raises(RuntimeError):
        _native.HostBuffer(4096, device=0)


@pytest.mark.skipif(not (torch.cuda.is_available() and _native.built_with_cuda), reason="needs a GPU")
def test_pinned_memory_is_pinned() -> None:
    buffer = _native.HostBuffer(HUGE_PAGE, device=torch.cuda.current_device())
    assert buffer.pinned_bytes == HUGE_PAGE
    assert torch.frombuffer(buffer, dtype=torch.uint8).is_pinned()


def test_memory_of_no_gpu_is_not_pinned() -> None:
    with pytest.raises(ValueError, match="for no device"):
        _native.HostBuffer(4096).pin(4096)


def test_pages_come_from_the_numa_node_that_is_asked_for() -> None:
    buffer = _native.HostBuffer.reserve(HUGE_PAGE, numa_node=0)
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("the kernel has no NUMA")
    (policy,) = [line.split()[1] for line in maps.read_text().splitlines() if line.startswith(f"{buffer.address:x} ")]
    if policy == "default":
        pytest.skip("this container may not choose NUMA nodes")
    assert policy == "prefer:0"
