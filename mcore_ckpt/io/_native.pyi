"""CRC-32, copies and file access at the speed of memory and disk. Built from csrc/.

An address is what `tensor.data_ptr()` returns, a size is in bytes, and a stream is a raw `cudaStream_t` handle
(`torch.cuda.Stream.cuda_stream`). Functions that take addresses need the caller to keep the memory alive until they
return. Jobs and copiers keep the objects alive that they are given: `HostBuffer`, `DeviceEvent` and `owner`. Everything
that takes time releases the GIL.

    crc = crc32(tensor.data_ptr(), tensor.nbytes)
"""

from collections.abc import Sequence
from os import PathLike

built_with_cuda: bool

def crc32(address: int, nbytes: int, seed: int = 0) -> int:
    """Returns the CRC-32 of zlib (polynomial 0xEDB88320), equal to `zlib.crc32(data, seed)`.

    `seed` is the CRC of the bytes before these, in 0..2**32-1. Method: Gopal et al., "Fast CRC Computation for Generic
    Polynomials Using PCLMULQDQ Instruction", Intel, 2009. Raises ValueError for a null address with bytes.
    """

def crc32_blocks(address: int, nbytes: int, block_bytes: int, threads: int = 1) -> list[int]:
    """Returns the CRC-32 of each block of `block_bytes` bytes. The last block may be shorter; no bytes have no blocks.

    Raises ValueError for a null address with bytes, `block_bytes` of 0 or `threads` below 1.
    """

def crc32_combine(first: int, second: int, second_nbytes: int) -> int:
    """Returns the CRC-32 of two consecutive pieces from the CRC of each, in O(log(second_nbytes))."""

def crc32_methods() -> list[str]:
    """Names the implementations that this CPU can run: "avx512", "pclmul", "arm", "tables". `crc32` uses the first."""

def crc32_by(method: str, address: int, nbytes: int, seed: int = 0) -> int:
    """Does `crc32` by one of `crc32_methods()`, for tests and benchmarks. Raises ValueError for any other name."""

def copy_host(destinations: list[int], sources: list[int], nbytes: list[int], threads: int) -> None:
    """Copies `nbytes[i]` bytes from `sources[i]` to `destinations[i]` for all i, on up to `threads` threads.

    Each thread copies about the same number of bytes, whatever the sizes. Raises ValueError, before any byte is copied,
    for lists of different lengths, a null address with bytes, `threads` below 1, or a source and a destination of one
    copy that overlap. The caller makes sure that no destination overlaps the source or destination of another copy.
    """

class DamagedBlock(ValueError):
    """The CRC of a block is wrong. `args`: the number of the read, the offset and the size of the block in the file."""

class ReadJob:
    """Reads ranges of files into memory. A block that has a CRC is checked before any byte of it is copied.

    The job reuses the buffers of earlier jobs; see `free_idle_buffers`.

    job = ReadJob(paths, threads=4, piece_bytes=16 << 20, block_bytes=1 << 20)
    half = width // 2  # read the second half of each row of a stored matrix
    job.add(0, offset, height * width, crcs, half, half, height, width, tensor.data_ptr(), half, owner=tensor)
    job.run()
    """

    def __init__(
        self,
        paths: list[str],
        *,
        threads: int,
        piece_bytes: int,
        block_bytes: int,
        direct: bool = True,
        pinned: bool = False,
    ) -> None:
        """Does not open files yet. Raises ValueError for unusable settings.

        Args:
            piece_bytes: how many bytes a thread reads at a time. At least a block is read at once.
            block_bytes: how many bytes a CRC covers.
            direct: bypass the page cache if the file system supports it.
            pinned: destinations may be on a GPU. Their bytes go through pinned buffers.
        """

    def add(
        self,
        file: int,
        offset: int,
        nbytes: int,
        crcs: list[int] | None,
        start: int,
        row_bytes: int,
        rows: int,
        source_stride: int,
        destination: int,
        destination_stride: int,
        on_device: bool = False,
        owner: object = None,
    ) -> int:
        """Adds a read of rows of a tensor that is stored at `[offset, offset + nbytes)` of a file.

        Row k is `row_bytes` bytes from byte `start + k * source_stride` of the tensor on, and is copied to
        `destination + k * destination_stride`. Only blocks that hold a byte of a row are read. A read without rows, or
        with empty rows, is allowed.

        Args:
            crcs: the CRC of each block; blocks begin at `offset`. None: the file has no CRCs, and nothing is checked.
            source_stride, destination_stride: at least `row_bytes`; ignored for a single row.
            owner: an object that owns the destination. The job keeps it alive. None: the caller keeps the destination
                alive until `run` has returned.

        Returns:
            The number of the read.

        Raises:
            ValueError: for arguments that contradict each other, such as rows that overlap or are not all in the
                tensor, for a second GPU, and after `run`.
            RuntimeError: with CUDA's message, or if the package was built without CUDA.
        """

    def run(self) -> None:
        """Reads everything. May be called once. It first waits for all work that is queued on the destinations' GPU.

        When it returns or raises, nothing is in flight any more. After an error some blocks have arrived and others
        have not. The error is the first one of any thread.

        Raises:
            DamagedBlock: the CRC of a block is wrong. None of its bytes has been copied.
            OSError: with the file and the byte in it; ENODATA if the file ends too early.
            MemoryError: there is no memory for the buffers.
            RuntimeError: "cancelled", or CUDA's message.
        """

    def progress(self) -> int:
        """Returns how many bytes have been read from files, including whole pages and small gaps between tensors."""

    def cancel(self) -> None:
        """Makes `run` end soon, and does not wait for that."""

    @property
    def scratch_bytes(self) -> int:
        """The most host memory that `run` uses, in bytes."""

class DeviceEvent:
    """Happens when copies from a GPU are done. Made by `DeviceCopier.start`."""

    def wait(self) -> None:
        """Blocks until the event has happened. Raises RuntimeError, with CUDA's message, if a copy has failed."""

class DeviceCopier:
    """Copies GPU tensors to a pinned buffer on a stream of its own, while training goes on.

    All methods may be called from any thread, also at the same time.

    groups = copier.start(buffer, offsets, sources, nbytes, torch.cuda.current_stream().cuda_stream, 16 << 20)
    ...  # queue work that only reads the tensors
    copier.hold(torch.cuda.current_stream().cuda_stream)
    ...  # queue work that changes them
    """

    def __init__(self, device: int) -> None: ...
    @property
    def stream(self) -> int:
        """The stream, for `tensor.record_stream(torch.cuda.ExternalStream(copier.stream))`. 0 after `close`."""

    def start(
        self,
        buffer: HostBuffer,
        offsets: list[int],
        sources: list[int],
        nbytes: list[int],
        after: int,
        group_bytes: int,
    ) -> list[tuple[int, DeviceEvent]]:
        """Queues copies behind the work that is queued on stream `after` now. The host does not wait for the GPU.

        The copier keeps the buffer alive until the copies are done. The caller keeps the sources alive. A copy is never
        split, so for events after about every `group_bytes` bytes, the caller cuts large tensors.

        Args:
            buffer: pinned.
            offsets: where in the buffer each copy goes; ascending.
            sources: addresses on the copier's GPU.

        Returns:
            After about every `group_bytes` bytes: how many of the copies are done when the event has happened, and the
            event (for `WriteJob.add_file`).

        Raises:
            ValueError: for lists of different lengths, a buffer that is not pinned, any destination that is not in the
                buffer or begins before the last one ends, and any source that is not on the copier's GPU. Nothing has
                been queued then.
            RuntimeError: with CUDA's message. Nothing is in flight any more.
        """

    def hold(self, stream: int) -> None:
        """Makes the work that is queued on `stream` from now on wait for the copies. The host does not wait."""

    def done(self) -> bool:
        """Returns whether all copies are done. Raises RuntimeError if one has failed."""

    def wait(self) -> None:
        """Waits until all copies are done. Raises RuntimeError if one has failed."""

    def close(self) -> None:
        """Waits for the copies, then frees the stream. All other methods raise ValueError from then on."""

class HostBuffer:
    """Zeroed host memory that starts on a huge page and consists of huge pages if the system has them.

    All its pages exist from the start. It supports the buffer protocol and is writable: `memoryview(buffer)`,
    `torch.frombuffer(buffer, dtype=torch.uint8)`. It is freed when nothing uses it any more: no Python reference, no
    view, no job and no copy.
    """

    address: int
    nbytes: int
    pinned: bool

    def __init__(self, nbytes: int, *, pinned: bool = False, threads: int = 1) -> None:
        """Fetches the pages on `threads` threads.

        A pinned buffer is for copies to and from GPUs. A forked child does not inherit it.

        Raises ValueError for 0 bytes or `threads` below 1, MemoryError if the system has no memory, RuntimeError with
        CUDA's message if pinning fails.
        """

    @staticmethod
    def reserve(nbytes: int, *, to_pin: bool = False) -> HostBuffer:
        """Maps memory whose pages are not there yet: `fetch` brings them. With `to_pin`, `pin` must follow.

        Raises ValueError for 0 bytes, MemoryError if the system refuses the mapping.
        """

    def fetch(self, begin: int, nbytes: int, *, threads: int = 1) -> None:
        """Fetches the pages of `nbytes` bytes from offset `begin`. Pages that are there already stay as they are.

        Raises ValueError for a range outside the buffer, MemoryError if the system has no memory.
        """

    def pin(self) -> None:
        """Pins the whole buffer for copies to and from GPUs. Its pages should have been fetched.

        Raises RuntimeError with CUDA's message if pinning fails.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...

def free_idle_buffers() -> int:
    """Frees the buffers that finished read jobs have left for the next job. Returns how many bytes they had.

    At most 257 MiB are kept, for the whole process. Call it after a load, if the memory is needed for something else.
    """

class FileLayout:
    """Where the bytes of each tensor, and the bytes between them, are in a file. Immutable; offsets and sizes in bytes.

    A slot is the place of one tensor, a gap is a range that belongs to no slot. A slot consists of blocks of
    `block_bytes` bytes; the last may be shorter. The *parts* of a range of the file are its non-empty intersections
    with blocks, in order.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        descriptor_crc_at: Sequence[int],
        gaps: Sequence[tuple[int, bytes]],
        end: int,
        block_bytes: int,
    ) -> None:
        """Takes the slots (`offsets`, `nbytes`) and the gaps (`(offset, bytes)`), both ascending.

        `descriptor_crc_at[i]` is the offset of the CRC-32 of slot i, 4 little-endian bytes in a gap after the slot. It
        is -1 if the file does not contain the CRC, as a safetensors file. Raises ValueError unless slots and gaps tile
        `[0, end)`.
        """

    def part_count(self, start: int, stop: int) -> int:
        """Returns how many parts `[start, stop)` has."""

    def join(self, cuts: Sequence[int], crcs: Sequence[Sequence[int]]) -> list[int]:
        """Computes the CRC of every block, in order, from those of the parts of each `[cuts[k], cuts[k + 1])`.

        `cuts` go from 0 to the end. Raises ValueError for other cuts, or for a wrong number of CRCs.
        """

    def slot_crcs(self, block_crcs: Sequence[int]) -> list[int]:
        """Computes the CRC of every slot (0 for an empty one) from those of all blocks.

        Raises ValueError for a wrong number of CRCs.
        """

    def file_crc(self, slot_crcs: Sequence[int]) -> int:
        """Computes the CRC of `[0, end)` with the descriptors filled in.

        Raises ValueError for a wrong number of CRCs.
        """

    def foreign_descriptors(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Returns `(offset, slot)` of each descriptor that the writer of one range between `cuts` cannot fill in.

        Such a descriptor has a byte in a range that begins after the begin of its slot. `WriteJob.finish` takes its
        CRC as a patch.
        """

class WriteJob:
    """Writes ranges of files on threads of its own. Each piece is copied, checked and written by one thread.

    The pieces are written in the order of the files, so the caller may `wait` for and `finish` one file while later
    files are being written. A file bypasses the page cache if its file system supports it. On tmpfs the job copies into
    huge pages if the system provides them quickly. Otherwise it writes pieces of at most 256 KiB.

    The job keeps buffers, events and owners alive until it is closed. Their bytes must not change before they are
    written. The job is closed when its last reference is dropped, too.

    The first error of a file ends the job for this file and all later ones: each of them raises it. A job can only be
    used in the process that made it: in a forked child `close` does nothing and everything else raises RuntimeError.
    """

    def __init__(self, *, threads: int, piece_bytes: int, direct: bool = True) -> None:
        """With O_DIRECT each thread copies pieces of `piece_bytes`. `direct=False` uses the page cache everywhere.

        Raises ValueError for `threads` below 1, or if `piece_bytes` is not a multiple of 4096.
        """

    def add_file(
        self,
        path: str | PathLike[str],
        layout: FileLayout,
        start: int,
        stop: int,
        *,
        sources: Sequence[int] | None = None,
        owner: object = None,
        buffer: HostBuffer | None = None,
        offset: int = 0,
        ready: Sequence[tuple[int, DeviceEvent]] = (),
    ) -> int:
        """Adds the bytes `[start, stop)` of a file, either from `sources` or from `buffer`. Keeps the rest of the file.

        Args:
            start, stop: multiples of 4096; `stop` may also be the layout's end.
            sources: the address of each slot's bytes. It may be 0 for slots outside the range.
            owner: an object that owns the sources. The job keeps it alive. None: the caller keeps them alive until
                the job has written them or is closed.
            buffer: has all slots of the range in place. The job writes the gaps into it.
            offset: where in the buffer the byte at `start` is, a multiple of 4096.
            ready: ascending `(file offset, event)`. The slots before the offset are in place in the buffer when the
                event has happened. Empty: all slots are in place already.

        Returns:
            The number of the file in the job.

        Raises ValueError for arguments that contradict each other, RuntimeError after `start`.
        """

    def start(self) -> None:
        """Raises RuntimeError at the second call, OSError (EAGAIN) if the system refuses to start a thread."""

    def wait(self, file: int, timeout: float | None = None) -> list[int] | None:
        """Waits until a file is written (not yet durable). Returns the CRCs of the parts of `[start, stop)`.

        Returns None after `timeout` seconds. Raises OSError (the message has the offset), RuntimeError if the GPU
        fails, `RuntimeError("cancelled")`, RuntimeError before `start`, ValueError for a number that no file has.
        """

    def finish(self, file: int, tail: bytes | None, patches: Sequence[tuple[int, int]] = ()) -> None:
        """Makes a file durable and closes it, on the calling thread. Call it after `wait` has returned.

        Args:
            tail: the bytes after the layout's end, with which the file ends. None if the range does not end the file.
            patches: `(offset, crc)`: the 4 little-endian bytes of the CRC are written at the offset, over what other
                writers have written there. Only with a tail.

        Raises OSError, also then the file is closed; ValueError; RuntimeError if the file is not written or is closed.
        """

    def progress(self) -> int:
        """Returns how many bytes have been written."""

    def times(self) -> tuple[float, float]:
        """Returns the seconds from the start until everything was copied, and until the last write.

        Everything was copied when the last byte was read from `sources` and the last `ready` event had happened. The
        first number is 0 if there are neither sources nor events.
        """

    def cancel(self) -> None:
        """Ends the job at the next pieces, without waiting for those in flight. Written files may be finished."""

    def close(self) -> None:
        """Cancels the rest, waits for the threads, closes the files, and drops the buffers, events and owners."""
