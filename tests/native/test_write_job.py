import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.pt_skeleton import build_skeleton
from mcore_ckpt.io import _native
from tests.native.layouts import PAGE, Reference, page_cuts, references

MEBIBYTE = 1 << 20
HUGE_PAGE = 2 * MEBIBYTE
TAIL = b"the bytes after the layout"


class Memory:
    """A file's payload in host memory: tensors here and there, or all in place in a buffer whose gaps are poisoned."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.payloads = [
            torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else torch.empty(0) for b in reference.payloads
        ]
        self.sources = [payload.data_ptr() for payload in self.payloads]

    def in_place(self, start: int, stop: int) -> _native.HostBuffer:
        buffer = _native.HostBuffer(max(1, stop - start))
        data = bytearray(b"\xa5" * self.reference.end)
        for offset, payload in zip(self.reference.offsets, self.reference.payloads, strict=True):
            data[offset : offset + len(payload)] = payload
        memoryview(buffer)[: stop - start] = data[start:stop]
        return buffer

    def add(self, job: _native.WriteJob, path: Path, start: int, stop: int, in_place: bool) -> int:
        layout = self.reference.layout()
        if in_place:
            return job.add_file(path, layout, start, stop, buffer=self.in_place(start, stop))
        return job.add_file(path, layout, start, stop, sources=self.sources, owner=self.payloads)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """On a disk, with O_DIRECT, and where there is none."""
    if request.param == "disk":
        yield tmp_path
    elif os.path.ismount("/dev/shm"):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
            yield Path(shared)
    else:
        pytest.skip("no /dev/shm")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reference=references(),
    piece=st.sampled_from([4096, 8192, 1 << 16]),
    threads=st.integers(1, 4),
    direct=st.booleans(),
    data=st.data(),
)
def test_any_file_by_any_writers(
    folder: Path, reference: Reference, piece: int, threads: int, direct: bool, data: st.DataObject
) -> None:
    path = folder / "file.pt"
    path.write_bytes(b"\xee" * data.draw(st.sampled_from([0, 100, reference.end + 9999])))  # left by an earlier try
    cuts = data.draw(page_cuts(reference.end))
    layout, memory = reference.layout(), Memory(reference)
    ranges = list(itertools.pairwise(cuts))
    jobs = {}
    parts: dict[int, list[int]] = {}
    for k in data.draw(st.permutations(range(len(ranges)))):
        jobs[k] = _native.WriteJob(threads=threads, piece_bytes=piece, direct=direct)
        assert memory.add(jobs[k], path, *ranges[k], in_place=data.draw(st.booleans())) == 0
        jobs[k].start()
        if data.draw(st.booleans()):
            jobs[k].wait(0)
    last = len(ranges) - 1
    for k, (start, stop) in enumerate(ranges):
        crcs_of_parts = jobs[k].wait(0)
        assert crcs_of_parts is not None
        parts[k] = crcs_of_parts
        assert parts[k] == reference.part_crcs(start, stop)
        assert jobs[k].progress() == stop - start
        if stop != reference.end:
            jobs[k].finish(0, None)
    crcs = layout.slot_crcs(layout.join(cuts, [parts[k] for k in range(len(ranges))]))
    patches = [(at, crcs[slot]) for at, slot in layout.foreign_descriptors(cuts)]
    for k, (_, stop) in enumerate(ranges):
        if stop == reference.end and k != last:
            jobs[k].finish(0, TAIL)
    jobs[last].finish(0, TAIL, patches)
    assert path.read_bytes() == reference.data + TAIL
    assert layout.file_crc(crcs) == zlib.crc32(reference.data)


@pytest.mark.parametrize("in_place", [False, True], ids=["sources", "in place"])
def test_large_pieces_and_several_files(folder: Path, in_place: bool) -> None:
    reference = Reference([5 * MEBIBYTE + 3, 0, 700, 3000, 40_000, 6 * MEBIBYTE], [70] * 6, 999, MEBIBYTE)
    memory = Memory(reference)
    job = _native.WriteJob(threads=3, piece_bytes=2 * MEBIBYTE)
    numbers = [memory.add(job, folder / f"file{i}", 0, reference.end, in_place) for i in range(3)]
    job.start()
    for number in numbers:
        assert job.wait(number) == reference.part_crcs(0, reference.end)
        job.finish(number, TAIL)
        assert (folder / f"file{number}").read_bytes() == reference.data + TAIL
    copied, written = job.times()
    assert (copied == 0) == in_place
    assert copied <= written < 60
    job.close()
    job.close()


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 200) | st.integers(0, 5 * MEBIBYTE), max_size=4),
    threads=st.integers(1, 3),
    kept=st.sampled_from([0, 3 * MEBIBYTE, 30 * MEBIBYTE]),
    data=st.data(),
)
def test_large_files_in_memory(
    memory_folder: Path, sizes: list[int], threads: int, kept: int, data: st.DataObject
) -> None:
    """Whole huge pages are stored into, the rest of a range is written."""
    reference = Reference([*sizes, 3 * HUGE_PAGE], [4094, *[60] * len(sizes)], 4000, MEBIBYTE)
    memory, path = Memory(reference), memory_folder / "file.pt"
    path.write_bytes(b"\xee" * kept)  # left by an earlier try
    cuts = data.draw(page_cuts(reference.end))
    jobs, parts = [], []
    for start, stop in itertools.pairwise(cuts):
        jobs.append(_native.WriteJob(threads=threads, piece_bytes=4 * MEBIBYTE))
        memory.add(jobs[-1], path, start, stop, in_place=data.draw(st.booleans()))
        jobs[-1].start()
    for job, (start, stop) in zip(jobs, itertools.pairwise(cuts), strict=True):
        parts.append(reference.part_crcs(start, stop))
        assert job.wait(0) == parts[-1]
    layout = reference.layout()
    crcs = layout.slot_crcs(layout.join(cuts, parts))
    patches = [(at, crcs[slot]) for at, slot in layout.foreign_descriptors(cuts)]
    jobs[-1].finish(0, TAIL, patches)
    assert path.read_bytes() == reference.data + TAIL


def shared_huge_pages() -> int:
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("ShmemHugePages:")]
    return int(line.split()[1]) << 10


def test_a_file_in_memory_is_made_of_huge_pages(memory_folder: Path) -> None:
    nbytes = 64 * MEBIBYTE
    layout = _native.FileLayout([0], [nbytes], [nbytes], [(nbytes, bytes(4))], nbytes + 4, MEBIBYTE)
    most = 0
    for attempt in range(5):
        # Frees huge pages that are quick to get again: where they are slow to get the job does without.
        _native.HostBuffer(8 * nbytes)
        source = _native.HostBuffer(nbytes)
        before = shared_huge_pages()
        job = _native.WriteJob(threads=2, piece_bytes=4 * MEBIBYTE)
        path = memory_folder / f"file{attempt}"
        job.add_file(path, layout, 0, nbytes + 4, sources=[source.address], owner=source)
        job.start()
        assert job.wait(0) is not None
        job.finish(0, TAIL)
        assert path.stat().st_size == nbytes + 4 + len(TAIL)
        most = max(most, shared_huge_pages() - before)
    if most == 0 and "[deny]" in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text():
        pytest.skip("the system makes no huge pages of files in memory")
    assert most > nbytes // 2


def pages_in_cache(path: Path) -> int:
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    resident = (ctypes.c_ubyte * -(-len(view) // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), resident) == 0
    return sum(page & 1 for page in resident)


@pytest.mark.parametrize("in_place", [False, True], ids=["sources", "in place"])
def test_what_goes_to_a_disk_goes_past_the_page_cache(tmp_path: Path, in_place: bool) -> None:
    try:
        descriptor = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.pwrite(descriptor, mmap.mmap(-1, MEBIBYTE), 0)
        os.close(descriptor)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    if pages_in_cache(tmp_path / "probe") != 0:
        pytest.skip("this file system takes O_DIRECT and uses the page cache")
    reference = Reference([5 * MEBIBYTE + 3, 700, 40_000, 6 * MEBIBYTE], [70] * 4, 999, MEBIBYTE)
    memory = Memory(reference)
    job = _native.WriteJob(threads=3, piece_bytes=MEBIBYTE)
    memory.add(job, tmp_path / "file", 0, reference.end, in_place)
    job.start()
    job.wait(0)
    job.finish(0, TAIL, [(reference.descriptors[0], reference.slot_crcs[0])])
    assert pages_in_cache(tmp_path / "file") == 0
    assert (tmp_path / "file").read_bytes() == reference.data + TAIL


def test_a_file_of_torch(folder: Path) -> None:
    tree = {"weights": {f"layer.{i}": torch.randn(200 + i, 301) for i in range(30)}, "none": torch.empty(0), "step": 7}
    tensors = [*tree["weights"].values(), tree["none"]]  # type: ignore[attr-defined]
    pt = build_skeleton(tree, tensors)
    layout = _native.FileLayout(
        [slot.offset for slot in pt.slots],
        [slot.nbytes for slot in pt.slots],
        [-1 if slot.descriptor_crc_at is None else slot.descriptor_crc_at for slot in pt.slots],
        list(pt.gaps),
        pt.records_end,
        MEBIBYTE,
    )
    job = _native.WriteJob(threads=2, piece_bytes=1 << 16)
    path = folder / "model_states.pt"
    sources = [tensor.data_ptr() for tensor in tensors]
    file = job.add_file(path, layout, 0, pt.records_end, sources=sources, owner=tensors)
    job.start()
    parts = job.wait(file)
    assert parts is not None
    crcs = layout.slot_crcs(layout.join([0, pt.records_end], [parts]))
    tail = pt.tail(crcs, b"{}", zlib.crc32(b"{}"))
    job.finish(file, tail)
    assert zlib.crc32(path.read_bytes()) == zlib.crc32(tail, layout.file_crc(crcs))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for mapped in [False, True]:
        torch.testing.assert_close(torch.load(path, weights_only=True, mmap=mapped), tree, rtol=0, atol=0)


def small_job(reference: Reference, paths: list[Path], threads: int = 2) -> tuple[_native.WriteJob, Memory]:
    memory = Memory(reference)
    job = _native.WriteJob(threads=threads, piece_bytes=PAGE)
    for path in paths:
        memory.add(job, path, 0, reference.end, False)
    return job, memory


SMALL = Reference([10_000, 20_000], [50, 60], 100, 4096)
BUFFER = _native.HostBuffer(SMALL.end)


def test_an_error_in_the_second_of_three_files_is_told_for_it_and_what_follows(folder: Path) -> None:
    job, _memory = small_job(SMALL, [folder / "0", folder / "missing" / "1", folder / "2"])
    job.start()
    for number in [1, 2, 1]:
        with pytest.raises(FileNotFoundError, match="opening at byte 0") as error:
            job.wait(number)
        assert error.value.filename == str(folder / "missing" / "1")
    assert job.wait(0) == SMALL.part_crcs(0, SMALL.end)
    job.finish(0, TAIL)
    assert (folder / "0").read_bytes() == SMALL.data + TAIL
    with pytest.raises(FileNotFoundError):
        job.finish(2, TAIL)


def test_a_path_that_is_no_utf_8_and_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    path.mkdir()
    job, _memory = small_job(SMALL, [path])
    job.start()
    with pytest.raises(IsADirectoryError) as error:
        job.wait(0)
    assert error.value.filename == str(path)


def test_a_folder_that_vanishes_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    job, _memory = small_job(SMALL, [tmp_path / "staging" / "file"])
    (tmp_path / "staging").rmdir()
    job.start()
    with pytest.raises(FileNotFoundError):
        job.wait(0)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """With O_DIRECT and without, in one process: to import torch takes longer."""
    script = f"""
import resource, signal, errno, torch
from mcore_ckpt.io import _native
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
source = torch.zeros(4 << 20, dtype=torch.uint8)
def write(path, end, tail, direct):
    gaps = [(end - 96, bytes(96))]
    layout = _native.FileLayout([0], [end - 96], [end - 90], gaps, end, 1 << 20)
    job = _native.WriteJob(threads=2, piece_bytes=1 << 16, direct=direct)
    job.add_file(path, layout, 0, end, sources=[source.data_ptr()])
    job.start()
    job.wait(0)
    job.finish(0, tail)
for direct in [False, True]:
    path = {str(tmp_path / "file")!r} + str(direct)
    for end, tail in [(4 << 20, b""), (1 << 20, b"x")]:
        try:
            write(path, end, tail, direct)
        except OSError as error:
            assert error.errno == errno.EFBIG and error.filename == path, error
            assert "at byte" in str(error), error
        else:
            raise SystemExit("no error")
    write(path, 1 << 20, b"", direct)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("piece", [PAGE, HUGE_PAGE])
@pytest.mark.parametrize("size", ["1m", "7m"])
def test_a_full_disk(tmp_path: Path, piece: int, size: str) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("may not mount a tmpfs")
    try:
        reference = Reference([9 * MEBIBYTE], [10], 100, MEBIBYTE)
        memory = Memory(reference)
        job = _native.WriteJob(threads=2, piece_bytes=piece)
        memory.add(job, mount / "file", 0, reference.end, in_place=False)
        job.start()
        with pytest.raises(OSError, match="at byte") as error:
            job.wait(0)
        assert error.value.errno == errno.ENOSPC
        job.close()
    finally:
        subprocess.run(["umount", mount], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    job, _memory = small_job(SMALL, [tmp_path / "file"])
    job.start()
    with pytest.raises(PermissionError):
        job.wait(0)


def test_cancel(tmp_path: Path) -> None:
    job, _memory = small_job(SMALL, [tmp_path / str(i) for i in range(300)])
    job.start()
    assert job.wait(0) == SMALL.part_crcs(0, SMALL.end)
    job.cancel()
    with pytest.raises(RuntimeError, match=r"^cancelled$"):
        job.wait(299)
    job.finish(0, TAIL)  # what has been written may be finished
    job.close()
    with pytest.raises(RuntimeError, match=r"^cancelled$"):
        job.finish(299, TAIL)


@pytest.mark.parametrize("started", [False, True])
def test_a_job_may_be_dropped_at_any_time(tmp_path: Path, started: bool) -> None:
    for _ in range(20):
        job, memory = small_job(SMALL, [tmp_path / str(i) for i in range(20)])
        if started:
            job.start()
        del job
        memory.payloads.clear()


def test_a_wait_ends_at_its_timeout(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    leased = os.open(path, os.O_RDONLY)
    fcntl.fcntl(leased, fcntl.F_SETSIG, signal.SIGURG)  # nobody minds this one
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_RDLCK)  # to open the file for writing is to wait until it is closed
    job, _memory = small_job(SMALL, [path])
    job.start()
    assert job.wait(0, 0) is None
    assert job.wait(0, -1.0) is None
    assert job.wait(0, 0.2) is None
    with pytest.raises(RuntimeError, match="not written yet"):
        job.finish(0, TAIL)
    os.close(leased)
    assert job.wait(0) == SMALL.part_crcs(0, SMALL.end)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


def test_a_job_keeps_the_buffer_until_it_is_closed(tmp_path: Path) -> None:
    nbytes = 64 * MEBIBYTE
    layout = _native.FileLayout([0], [nbytes], [-1], [], nbytes, MEBIBYTE)
    buffer = _native.HostBuffer(PAGE + nbytes)
    memoryview(buffer)[PAGE:] = b"\x07" * nbytes
    job = _native.WriteJob(threads=2, piece_bytes=MEBIBYTE)
    job.add_file(tmp_path / "file", layout, 0, nbytes, buffer=buffer, offset=PAGE)
    before = resident_bytes()
    job.start()
    del buffer
    job.wait(0)
    job.finish(0, b"")
    assert zlib.crc32((tmp_path / "file").read_bytes()) == zlib.crc32(b"\x07" * nbytes)
    job.close()
    assert before - resident_bytes() > nbytes // 2


class Owner:
    """Can be referred to weakly, as lists and tuples cannot."""


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_job_keeps_the_owner_of_the_sources_until_its_end(tmp_path: Path, end: str) -> None:
    memory, owner = Memory(SMALL), Owner()
    alive = weakref.ref(owner)
    job = _native.WriteJob(threads=1, piece_bytes=PAGE)
    job.add_file(tmp_path / "file", SMALL.layout(), 0, SMALL.end, sources=memory.sources, owner=owner)
    del owner
    assert alive() is not None
    job.start()
    job.wait(0)
    assert alive() is not None
    if end == "close":
        job.close()
    else:
        del job
    assert alive() is None


def test_a_forked_child_leaves_the_job_alone(tmp_path: Path) -> None:
    job, _memory = small_job(SMALL, [tmp_path / str(i) for i in range(100)])
    job.start()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            job.wait(0)
        except RuntimeError:
            job.close()
            del job
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert job.wait(99) == SMALL.part_crcs(0, SMALL.end)


def test_a_wrong_order_is_refused(tmp_path: Path) -> None:
    job, memory = small_job(SMALL, [tmp_path / "file"])
    with pytest.raises(RuntimeError, match="has not been started"):
        job.wait(0)
    job.start()
    with pytest.raises(RuntimeError, match="started once"):
        job.start()
    with pytest.raises(RuntimeError, match="before the job is started"):
        memory.add(job, tmp_path / "other", 0, SMALL.end, False)
    job.wait(0)
    for number in [1, -1, 2**40]:
        with pytest.raises(ValueError, match=f"there is no file {number}"):
            job.wait(number)
        with pytest.raises(ValueError, match=f"there is no file {number}"):
            job.finish(number, TAIL)
    with pytest.raises(ValueError, match="a tail belongs to the range that ends the file"):
        job.finish(0, None)
    with pytest.raises(ValueError, match="beyond the end"):
        job.finish(0, TAIL, [(SMALL.end - 3, 1)])
    job.finish(0, TAIL)
    with pytest.raises(RuntimeError, match="closed already"):
        job.finish(0, TAIL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 1}, "multiples of 4096"),
        ({"stop": 4097}, "multiples of 4096"),
        ({"stop": 2**40}, "no range of a file"),
        ({"start": 8192, "stop": 4096}, "no range of a file"),
        ({"sources": [1]}, "1 sources for 2 slots"),
        ({"sources": [1, 0]}, "null address for slot 1"),
        ({"buffer": BUFFER}, "pass either sources or"),
        ({"sources": None}, "pass either sources or"),
        ({"sources": None, "buffer": BUFFER, "offset": 1}, "1, is not a multiple of 4096"),
        ({"sources": None, "buffer": BUFFER, "offset": PAGE}, "ends before the 30210 bytes of the range"),
        ({"sources": None, "buffer": BUFFER, "offset": 2**64 - PAGE}, "ends before the"),
        ({"sources": None, "buffer": BUFFER, "ready": [(2, None)]}, "is None"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    job = _native.WriteJob(threads=1, piece_bytes=PAGE)
    arguments = {"start": 0, "stop": SMALL.end, "sources": [1, 1], **change}
    with pytest.raises(ValueError, match=message):
        job.add_file(tmp_path / "file", SMALL.layout(), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("threads", "piece"), [(0, 4096), (1, 0), (1, 4097)])
def test_unusable_settings_are_refused(threads: int, piece: int) -> None:
    with pytest.raises(ValueError, match=r"at least 1|a multiple of 4096"):
        _native.WriteJob(threads=threads, piece_bytes=piece)


def test_a_job_without_files_has_nothing_to_do() -> None:
    job = _native.WriteJob(threads=4, piece_bytes=4096)
    job.start()
    assert job.progress() == 0
    job.close()
