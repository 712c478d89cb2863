"""Computes CRC-32, copies memory, and reads and writes files, at the speed of memory and disk. Built from csrc/.

An address is what `tensor.data_ptr()` returns, a size is in bytes, and a stream is a raw `cudaStream_t` handle
(`torch.cuda.Stream.cuda_stream`). If a function has addresses as arguments, the caller must keep the memory alive until
the function returns. Jobs and copiers keep alive each `HostBuffer`, `DeviceEvent` and `owner` that they receive. All
functions that take time release the GIL.

    crc = crc32(tensor.data_ptr(), tensor.nbytes)
"""

from collections.abc import Sequence
from os import PathLike

built_with_cuda: bool

def crc32(address: int, nbytes: int, seed: int = 0) -> int:
    """Returns the CRC-32 of zlib (polynomial 0xEDB88320), equal to `zlib.crc32(data, seed)`.

    `seed` is the CRC of the preceding bytes, in 0..2**32-1. Method: Gopal et al., "Fast CRC Computation for Generic
    Polynomials Using PCLMULQDQ Instruction", Intel, 2009. Raises ValueError for a null address if `nbytes` is not 0.
    """

def crc32_blocks(address: int, nbytes: int, block_bytes: int, threads: int = 1) -> list[int]:
    """Returns the CRC-32 of each block of `block_bytes` bytes. The last block can be shorter. 0 bytes have no blocks.

    Raises ValueError for a null address if `nbytes` is not 0, for `block_bytes` of 0, and for `threads` below 1.
    """

def crc32_combine(first: int, second: int, second_nbytes: int) -> int:
    """Computes the CRC-32 of two consecutive pieces from the CRCs of the pieces, in O(log(second_nbytes)) time."""

def crc32_methods() -> list[str]:
    """Returns which of "avx512", "pclmul", "arm" and "tables" this CPU can run. `crc32` uses the first one returned."""

def crc32_by(method: str, address: int, nbytes: int, seed: int = 0) -> int:
    """Computes what `crc32` computes by one of `crc32_methods()`, for tests and benchmarks.

    Raises ValueError for any other method.
    """

def copy_host(destinations: list[int], sources: list[int], nbytes: list[int], threads: int) -> None:
    """Copies `nbytes[i]` bytes from `sources[i]` to `destinations[i]` for all i, on up to `threads` threads.

    Each thread copies about the same number of bytes, whatever the sizes of the copies. Raises ValueError, before any
    byte is copied, if the lists have different lengths, if an address is null although `nbytes[i]` is not 0, if
    `threads` is below 1, or if the source and the destination of a copy overlap. The caller must make sure that no
    destination overlaps the source or the destination of another copy.
    """

def dequantize(
    *,
    codes: int,
    row_bytes: int,
    bits: int,
    rows: int,
    columns: int,
    first_row: int,
    first_column: int,
    table: int,
    scales: int,
    scale_rows: int,
    row_scales: int,
    block_rows: int,
    block_columns: int,
    values: int,
    row_elements: int,
    bfloat16: bool,
    threads: int,
) -> None:
    """Computes the values of quantized weights: `table[code] * scale`, in float32, for a part of a matrix of codes.

    The code at row r and column c of the part belongs to the block at row `(first_row + r) // block_rows` and column
    `(first_column + c) // block_columns` of the scales.

    Args:
        codes: the address of the first code.
        row_bytes: the bytes from one row of codes to the next.
        bits: 8, or 4 for two codes in each byte, the first in its lower half.
        rows, columns: the size of the part, in codes.
        first_row, first_column: the place of the part in the matrix.
        table: the address of the float32 values of all 2**bits codes.
        scales: the address of the float32 scales of the matrix.
        scale_rows: how many rows of blocks have scales.
        row_scales: how many scales a row of blocks has.
        block_rows, block_columns: the size of a block, in codes.
        values: the address of the first value.
        row_elements: the elements from one row of values to the next.
        bfloat16: True to write bfloat16, rounded to nearest even, False to write float32.
        threads: the most threads to use.

    Raises ValueError, before anything is written, for an address that is null, for rows that overlap, for rows or
    columns without scales, and for unusable numbers.
    """

class DamagedBlock(ValueError):
    """The CRC of a block is wrong. `args` are the number of the read, and the block's offset and size in the file."""

class ReadJob:
    """A job that reads ranges of files into memory. It checks a block's CRC before it copies any byte of the block.

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
        device_timeout: float = ...,
    ) -> None:
        """Prepares a job without opening the files. Raises ValueError for unusable settings.

        Args:
            piece_bytes: how many bytes a thread reads at a time. It always reads at least one block.
            block_bytes: how many bytes a CRC covers.
            direct: whether to bypass the page cache if the file system supports that.
            pinned: whether to read into pinned buffers, which is required for destinations on a GPU.
            device_timeout: how many seconds to wait for a GPU: for the work that is queued on it, and for each copy. If
                such a wait takes longer, `run` raises DeviceStuck.
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
        device: int | None = None,
        owner: object = None,
    ) -> int:
        """Adds a read of rows of a tensor that is stored at `[offset, offset + nbytes)` of a file.

        Row k consists of `row_bytes` bytes, begins at byte `start + k * source_stride` of the tensor, and is copied to
        `destination + k * destination_stride`. Only blocks that contain a byte of a row are read. A read without rows,
        or with empty rows, is allowed.

        Args:
            crcs: the CRC of each block. The first block begins at `offset`. None if the file has no CRCs; then nothing
                is checked.
            source_stride, destination_stride: at least `row_bytes`; ignored for a single row.
            device: the GPU of the destination; None for host memory.
            owner: an object that owns the destination. The job keeps this object alive. If it is None, the caller must
                keep the destination alive until `run` has returned.

        Returns:
            The number of the read.

        Raises:
            ValueError: the arguments contradict each other (for example, rows overlap, or are not inside the tensor),
                the job has destinations on another GPU, or `run` has been called.
            RuntimeError: CUDA failed (the message is CUDA's), or the package was built without CUDA.
        """

    def run(self) -> None:
        """Reads everything. Can be called only once.

        Before it reads, it waits for all work that is queued on the destinations' GPU. After it has returned or raised,
        no read or copy is in flight. After an error, some blocks have been copied and others have not. If several
        threads fail, the first error is raised.

        Raises:
            DamagedBlock: the CRC of a block is wrong. No byte of this block has been copied.
            OSError: a file cannot be read. The error names the file and the byte. It is ENODATA if the file is too
                short.
            MemoryError: there is no memory for the buffers.
            RuntimeError: the job was cancelled (the message is "cancelled"), or CUDA failed (the message is CUDA's).
        """

    def longest_call(self) -> tuple[str, str, float] | None:
        """Returns the call to the system that has lasted longest: its name, its file, and for how many seconds it has
        lasted. None if no call is under way.
        """

    def progress(self) -> int:
        """Returns how many bytes have been read from files, including unneeded bytes in pages and between tensors."""

    def cancel(self) -> None:
        """Makes `run` end soon. Does not wait until it has ended."""

    @property
    def scratch_bytes(self) -> int:
        """The most host memory that `run` uses, in bytes."""

class DeviceStuck(RuntimeError):
    """A GPU has not done its work in time.

    `args` are the GPU's number and the seconds that a thread has waited for it.
    """

def wait_for_device(device: int, timeout: float) -> None:
    """Waits until a GPU has done all queued work. A GPU that this process does not use has no such work.

    Raises DeviceStuck after `timeout` seconds.
    """

def side_stream(device: int) -> int:
    """Returns a stream for copies from a GPU, as `torch.cuda.ExternalStream` takes it. It is never destroyed.

    Each call returns the same stream. It is not in torch's pool, whose streams other code shares. Raises RuntimeError
    if CUDA fails.
    """

def numa_node_of(device: int) -> int:
    """Returns the NUMA node whose memory is nearest to a GPU; -1 if the system does not tell."""

class DeviceEvent:
    """An event that happens when a group of copies from a GPU is done. `DeviceCopier.start` makes it."""

    def happened(self) -> bool:
        """Returns whether the event has happened. Raises RuntimeError, with CUDA's message, if a copy has failed."""

class DeviceCopier:
    """Copies GPU tensors to a pinned buffer on another stream, while training continues.

    All methods can be called from any thread, even at the same time.

    copier = DeviceCopier(device, side_stream(device))
    groups = copier.start(buffer, offsets, sources, nbytes, torch.cuda.current_stream().cuda_stream, 64 << 20)
    ...  # queue work that only reads the tensors
    copier.hold(torch.cuda.current_stream().cuda_stream, 60.0)
    ...  # queue work that changes them
    """

    def __init__(self, device: int, stream: int) -> None:
        """Prepares copies on a stream. The stream must outlive all tensors that were recorded on it.

        Raises ValueError for the default stream.
        """

    def start(
        self,
        buffer: HostBuffer,
        offsets: list[int],
        sources: list[int],
        nbytes: list[int],
        after: int,
        group_bytes: int,
    ) -> list[tuple[int, DeviceEvent]]:
        """Queues copies, which begin after the work that is queued on stream `after` now. Does not wait for the GPU.

        Small copies come first, and then the large ones in order. The copier keeps the buffer alive until the copies
        are done. The caller must keep the sources alive. The caller must cut tensors that are much larger than
        `group_bytes` into several copies, if an event is needed after about every `group_bytes` bytes.

        Args:
            buffer: a buffer whose bytes are pinned.
            offsets: the offset in the buffer of each copy's destination; ascending.
            sources: addresses on the copier's GPU.

        Returns:
            One pair for about every `group_bytes` bytes of large copies, and one at the end: the number of copies that
            are done when the event has happened, and the event. The events are for `WriteJob.add_file`.

        Raises:
            ValueError: the lists have different lengths, the buffer is not pinned, a destination is not inside the
                buffer or begins before the previous one ends, or a source is not on the copier's GPU. Nothing has been
                queued.
            RuntimeError: CUDA failed (the message is CUDA's). The buffer stays until no copy can be in flight.
        """

    def hold(self, stream: int, timeout: float) -> None:
        """Makes all work that is queued on `stream` from now on wait for the copies, if any are under way.

        The host waits for the copies only if the stream is being captured into a CUDA graph. In this case, raises
        DeviceStuck after `timeout` seconds. Raises RuntimeError if a copy has failed.
        """

    def done(self) -> bool:
        """Returns whether all copies are done. Raises RuntimeError if a copy has failed."""

    def wait(self, timeout: float) -> None:
        """Waits until all copies are done. Afterwards `hold`, `done` and `wait` do not call CUDA.

        Raises DeviceStuck after `timeout` seconds, and RuntimeError if a copy has failed.
        """

    def close(self, timeout: float) -> None:
        """Waits for the copies. Other methods raise ValueError from then on.

        Raises DeviceStuck or RuntimeError as `wait` does; the copier is closed nevertheless, and host memory that the
        GPU may still write to is never freed.
        """

class HostBuffer:
    """A buffer of zeroed host memory, aligned to huge pages. It consists of huge pages if the system has them.

    All pages exist from the start, except in a buffer from `reserve`. The buffer supports the buffer protocol and is
    writable: `memoryview(buffer)`, `torch.frombuffer(buffer, dtype=torch.uint8)`. The memory is freed as soon as no
    Python reference, view, job or copy uses it.
    """

    PIN_BYTES: int  # how much is pinned in one call at most

    address: int
    nbytes: int
    device: int | None  # the GPU that copies to or from the buffer
    pinned_bytes: int  # how many bytes from the beginning are pinned

    def __init__(self, nbytes: int, *, device: int | None = None, threads: int = 1) -> None:
        """Allocates the memory, and fetches its pages on `threads` threads.

        With a `device`, the memory is pinned for copies to and from this GPU, and a forked child does not inherit it.

        Raises ValueError for 0 bytes or `threads` below 1, MemoryError if the system does not have the memory, and
        RuntimeError with CUDA's message if pinning fails.
        """

    @staticmethod
    def reserve(nbytes: int, *, device: int | None = None, numa_node: int = -1) -> HostBuffer:
        """Maps memory without its pages, which `fetch` then fetches. With a `device`, `pin` must be called later.

        The pages come from the NUMA node, if it has any left and the system allows to choose; -1 is any node.

        Raises ValueError for 0 bytes, and MemoryError if the system refuses the mapping.
        """

    def fetch(self, begin: int, nbytes: int, *, threads: int = 1) -> None:
        """Fetches the pages of `nbytes` bytes from offset `begin`. Pages that exist already do not change.

        Raises ValueError for a range outside the buffer, and MemoryError if the system does not have the memory.
        """

    def pin(self, nbytes: int) -> None:
        """Pins the first `nbytes` bytes for copies to and from GPUs. Their pages should have been fetched.

        Raises RuntimeError with CUDA's message if pinning fails, and ValueError for a buffer without a device.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...

def free_idle_buffers() -> int:
    """Frees the buffers that finished read jobs have left for later jobs. Returns how many bytes were freed.

    A process keeps at most 257 MiB of such buffers. Call this function after a load if the memory is needed for
    something else.
    """

class FileLayout:
    """The places in a file of each tensor's bytes and of the bytes between tensors.

    A layout is immutable. All offsets and sizes are in bytes.

    A slot is the place of one tensor. A gap is a range that belongs to no slot. A slot consists of blocks of
    `block_bytes` bytes; the last block can be shorter. The *parts* of a range of the file are the non-empty
    intersections of the range with blocks, in order.
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
        """Describes a file by its slots (`offsets`, `nbytes`) and its gaps (`(offset, bytes)`), both ascending.

        `descriptor_crc_at[i]` is the offset of slot i's CRC-32, which is stored as 4 little-endian bytes in a gap after
        the slot. It is -1 if the file does not contain the CRC, for example in a safetensors file. Raises ValueError
        unless slots and gaps together cover `[0, end)` without overlaps.
        """

    def part_count(self, start: int, stop: int) -> int:
        """Returns how many parts `[start, stop)` has."""

    def join(self, cuts: Sequence[int], crcs: Sequence[Sequence[int]]) -> list[int]:
        """Computes the CRC of every block, in order. `crcs[k]` are the CRCs of the parts in `[cuts[k], cuts[k + 1])`.

        The first cut is 0, the last is the layout's end. Raises ValueError for other cuts, or for a wrong number of
        CRCs.
        """

    def slot_crcs(self, block_crcs: Sequence[int]) -> list[int]:
        """Computes the CRC of every slot (0 for an empty slot) from the CRCs of all blocks.

        Raises ValueError for a wrong number of CRCs.
        """

    def file_crc(self, slot_crcs: Sequence[int]) -> int:
        """Computes the CRC of `[0, end)`, in which every descriptor contains its slot's CRC.

        Raises ValueError for a wrong number of CRCs.
        """

    def foreign_descriptors(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Returns `(offset, slot)` for each descriptor that the writer of its bytes cannot fill in.

        Each writer writes one range between two `cuts`. If a byte of a slot's descriptor is in a range that begins
        after the beginning of the slot, the range's writer cannot compute the slot's CRC. `WriteJob.finish` writes this
        CRC as a patch.
        """

class WriteJob:
    """A job that writes ranges of files on its own threads. One thread copies, checksums and writes each piece.

    The pieces are written in the order of the files, so the caller can `wait` for and `finish` one file while later
    files are being written. The job bypasses the page cache if the file system supports that. On tmpfs, the job copies
    into huge pages if the system provides them quickly. Otherwise, it writes pieces of at most 256 KiB there.

    The job keeps buffers, events and owners alive until it is closed. The bytes to write must not change before they
    are written. Dropping the last reference to a job closes the job, too.

    After an error in a file, the job writes neither the rest of this file nor any later file, and `wait` raises the
    error for each of them. A job can be used only in the process that made it. In a forked child, `close` does nothing
    and all other methods raise RuntimeError.
    """

    def __init__(self, *, threads: int, piece_bytes: int, direct: bool = True, device_timeout: float = 1e9) -> None:
        """Prepares a job. With O_DIRECT, each thread copies pieces of `piece_bytes`. `direct=False` disables O_DIRECT.

        `device_timeout` is how long the job waits for a GPU that does nothing, in seconds.

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
        device: int | None = None,
        on_device: Sequence[bool] = (),
        buffer: HostBuffer | None = None,
        offset: int = 0,
        ready: Sequence[tuple[int, DeviceEvent]] = (),
    ) -> int:
        """Adds the bytes `[start, stop)` of a file, either from `sources` or from `buffer`.

        Bytes of the file outside this range do not change.

        Args:
            start, stop: multiples of 4096; `stop` can also be the layout's end.
            sources: the address of each slot's bytes. It can be 0 for slots outside the range.
            owner: an object that owns the sources. The job keeps this object alive. If it is None, the caller must keep
                the sources alive until the job has written them or is closed.
            device: the GPU that some of the sources are on; None if all are in host memory. The job copies the sources
                on the GPU piece by piece. The GPU must have done all work that changes these sources.
            on_device: for each slot, whether its source is on the GPU.
            buffer: a buffer with all slots of the range in place. The job writes the gaps into it.
            offset: the offset in the buffer of the file's byte `start`; a multiple of 4096.
            ready: ascending pairs `(file offset, event)`. Once the event has happened, all slots before the offset are
                in place in the buffer. If `ready` is empty, all slots are in place already.

        Returns:
            The number of the file in the job.

        Raises ValueError if the arguments contradict each other, and RuntimeError after `start`.
        """

    def start(self) -> None:
        """Starts the threads.

        Raises RuntimeError at the second call, and OSError (EAGAIN) if the system refuses to start a thread.
        """

    def wait(self, file: int, timeout: float | None = None) -> list[int] | None:
        """Waits until a file is written, though not yet durable. Returns the CRCs of the parts of `[start, stop)`.

        Returns None if the file is not written after `timeout` seconds.

        Raises:
            OSError: writing failed. The message has the offset.
            DeviceStuck: the GPU has done nothing for `device_timeout` seconds.
            RuntimeError: the GPU failed, the job was cancelled (the message is "cancelled"), or `start` has not been
                called.
            ValueError: no file has this number.
        """

    def longest_call(self) -> tuple[str, str, float] | None:
        """Does the same as `ReadJob.longest_call`."""

    def limit_device_wait(self, seconds: float) -> None:
        """Makes the job wait at most `seconds` seconds for a GPU from now on."""

    def finish(self, file: int, tail: bytes | None, patches: Sequence[tuple[int, int]] = ()) -> None:
        """Makes a file durable and closes it, on the calling thread. Call it after `wait` has returned.

        Args:
            tail: the last bytes of the file, after the layout's end. None if the range is not the last of the file.
            patches: pairs `(offset, crc)`. Each CRC is written at its offset as 4 little-endian bytes, and replaces the
                bytes that another writer has written there. Patches are allowed only with a tail.

        Raises:
            OSError: the file cannot be made durable. It is closed nevertheless.
            ValueError: the arguments contradict each other, or no file has this number.
            RuntimeError: the file is not written yet, or is closed already.
        """

    def progress(self) -> int:
        """Returns how many bytes have been written."""

    def times(self) -> tuple[float, float]:
        """Returns two times in seconds after `start`: when everything was copied, and when the last write ended.

        Everything is copied when the last byte has been read from `sources` and the last `ready` event has happened.
        The first number is 0 if there are neither sources nor events.
        """

    def cancel(self) -> None:
        """Ends the job before its next pieces. Does not wait for pieces in flight. Written files can be finished."""

    def close(self) -> None:
        """Cancels the job, waits for its threads, closes the files, and drops the buffers, events and owners."""
