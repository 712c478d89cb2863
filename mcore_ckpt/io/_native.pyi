"""CRC-32, copies and files at the speed of memory and disk; built from csrc/.

Addresses are what `tensor.data_ptr()` returns, sizes are in bytes, streams are raw `cudaStream_t` handles
(`torch.cuda.Stream.cuda_stream`). The caller keeps the memory alive. Everything that takes time releases the GIL.

    crc = crc32(tensor.data_ptr(), tensor.nbytes)
"""

from collections.abc import Sequence
from os import PathLike

built_with_cuda: bool

def crc32(address: int, nbytes: int, seed: int = 0) -> int:
    """The CRC-32 of zlib (polynomial 0xEDB88320), bit-identical with `zlib.crc32(data, seed)`.

    `seed` is the CRC of the bytes before these, in 0..2**32-1. Method: Gopal et al., "Fast CRC Computation for Generic
    Polynomials Using PCLMULQDQ Instruction", Intel, 2009. Raises ValueError for a null address with bytes.
    """

def crc32_blocks(address: int, nbytes: int, block_bytes: int, threads: int = 1) -> list[int]:
    """The CRC-32 of every `block_bytes` bytes, the last block may be shorter; no bytes, no blocks.

    Raises ValueError for a null address with bytes, `block_bytes` of 0 or `threads` below 1.
    """

def crc32_combine(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two pieces in a row, from the CRC of each and the size of the second; O(log(second_nbytes))."""

def crc32_methods() -> list[str]:
    """The implementations this CPU can run, of "avx512", "pclmul", "arm", "tables"; `crc32` uses the first."""

def crc32_by(method: str, address: int, nbytes: int, seed: int = 0) -> int:
    """`crc32` by one of `crc32_methods()`; for tests and benchmarks. Raises ValueError for any other name."""

def copy_host(destinations: list[int], sources: list[int], nbytes: list[int], threads: int) -> None:
    """Copies `nbytes[i]` from `sources[i]` to `destinations[i]` for all i, on up to `threads` threads.

    The bytes are spread evenly over the threads, whatever the sizes. Raises ValueError, before any byte is copied, for
    lists of different lengths, a null address with bytes, `threads` below 1, or a copy whose two ends overlap. No other
    two destinations, and no destination and another copy's source, may overlap either: that is not checked.
    """

class DamagedBlock(ValueError):
    """`args`: number of the read, offset and size of the block in the file whose CRC is wrong."""

class ReadJob:
    """Reads ranges of files into memory. Every block that has a CRC is checked before a byte of it goes to its
    destination.

    job = ReadJob(paths, threads=4, piece_bytes=16 << 20, block_bytes=1 << 20)
    half = width // 2  # of each row of a stored matrix, the second one
    job.add(0, offset, height * width, crcs, half, half, height, width, tensor.data_ptr(), half)
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
        """Opens nothing yet. Raises ValueError for settings that cannot be meant.

        Args:
            piece_bytes: what a thread reads at a time, at least a block.
            block_bytes: what a CRC covers.
            direct: past the page cache, where the file system can.
            pinned: destinations may be on a GPU. They get their bytes through pinned buffers.
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
    ) -> int:
        """Of a tensor stored at `[offset, offset + nbytes)` of a file, rows go to addresses.

        Row k is the tensor's bytes from `start + k * source_stride` on and goes to `destination + k *
        destination_stride`. Only blocks that hold a byte of a row are read; no rows, or empty ones, are no error.

        Args:
            crcs: of each block; blocks begin at `offset`. None: the file has none, and its bytes are taken for right.
            source_stride, destination_stride: at least `row_bytes`; not looked at for a single row.

        Returns:
            The number of the read.

        Raises:
            ValueError: for what cannot be meant, such as rows that overlap or leave the tensor, for a second GPU, and
                once the job has run.
            RuntimeError: with CUDA's words, and where the package was built without CUDA.
        """

    def run(self) -> None:
        """Reads all, once, and waits first for everything that is queued on the GPU that destinations are on.

        Whether it returns or raises, nothing is in flight any more. After an error some blocks have arrived and others
        have not. The error is the first that any thread met.

        Raises:
            DamagedBlock: a block's CRC is wrong; none of its bytes has been copied.
            OSError: with the file and the byte in it; ENODATA where the file ends too early.
            MemoryError: for the buffers.
            RuntimeError: "cancelled", or CUDA's words.
        """

    def progress(self) -> int:
        """Bytes read from files so far: whole pages and small gaps between tensors count, too."""

    def cancel(self) -> None:
        """Makes `run` end soon. Does not wait."""

    @property
    def scratch_bytes(self) -> int:
        """Host memory that `run` uses at most."""

class DeviceCopier:
    """Copies GPU tensors to pinned host memory on a stream of its own, behind the caller's back.

    groups = copier.start(destinations, sources, nbytes, torch.cuda.current_stream().cuda_stream, 16 << 20)
    ...  # queue what only reads the tensors
    copier.hold(torch.cuda.current_stream().cuda_stream)
    ...  # queue what changes them
    """

    def __init__(self, device: int) -> None: ...
    @property
    def stream(self) -> int:
        """For `tensor.record_stream(torch.cuda.ExternalStream(copier.stream))`; 0 once closed."""

    def start(
        self, destinations: list[int], sources: list[int], nbytes: list[int], after: int, group_bytes: int
    ) -> list[tuple[int, int]]:
        """Queues copies behind what is queued on stream `after` now. The host does not wait for the GPU.

        The caller keeps both ends until the copies are done. A copy is never split: for events after about every
        `group_bytes`, cut large tensors.

        Args:
            destinations: ascending addresses in one pinned buffer.
            sources: on the copier's GPU.

        Returns:
            After about every `group_bytes`: how many of the copies are done by then, and the event (for
            `WriteJob.add_file`) that tells. Events serve again at the next call and go with `close`.

        Raises:
            ValueError: for lists of different lengths, null addresses with bytes, sources on another GPU or none,
                destinations that are not pinned.
            RuntimeError: with CUDA's words. Nothing is in flight any more.
        """

    def hold(self, stream: int) -> None:
        """What is queued on `stream` from now on waits for the copies. The host does not."""

    def done(self) -> bool: ...
    def wait(self) -> None:
        """Until all copies are done. Raises RuntimeError if one has failed."""

    def close(self) -> None:
        """Waits, then frees stream and events."""

class HostBuffer:
    """Host memory that starts on a huge page and is made of huge pages where the system gives them; zeroed.

    All its pages are there from the start. Supports the buffer protocol, writable: `memoryview(buffer)`,
    `torch.frombuffer(buffer, dtype=torch.uint8)`. Freed when the last reference goes, those included.
    """

    address: int
    nbytes: int
    pinned: bool

    def __init__(self, nbytes: int, *, pinned: bool = False, threads: int = 1) -> None:
        """Fetches the pages on `threads` threads. `pinned`: for copies to and from GPUs; not inherited by a fork.

        Raises ValueError for 0 bytes or `threads` below 1, MemoryError where the system has no memory, RuntimeError in
        CUDA's words where pinning fails.
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

class FileImage:
    """The layout of a file without its payload; immutable. All offsets and sizes are in bytes.

    A slot is the place of one tensor. Its blocks begin at its offset, every `block_bytes`; the last may be shorter. The
    *parts* of a range of the file are its non-empty intersections with blocks, in order.
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
        """`offsets`, `nbytes`: the slots, ascending. `gaps`: `(offset, bytes)`, all that is not in a slot, ascending.

        `descriptor_crc_at[i]`: where in the gaps after slot i the 4 little-endian bytes of its CRC-32 go; -1: nowhere,
        as in a safetensors file. Raises ValueError unless slots and gaps tile `[0, end)`.
        """

    def part_count(self, start: int, stop: int) -> int:
        """How many parts `[start, stop)` has."""

    def join(self, cuts: Sequence[int], crcs: Sequence[Sequence[int]]) -> list[int]:
        """The CRC of every block, in order, from those of the parts of each `[cuts[k], cuts[k + 1])`.

        `cuts` go from 0 to the end. Raises ValueError for cuts that do not, or counts that do not fit.
        """

    def slot_crcs(self, block_crcs: Sequence[int]) -> list[int]:
        """The CRC of every slot (0 for an empty one) from that of every block. Raises ValueError for a wrong count."""

    def file_crc(self, slot_crcs: Sequence[int]) -> int:
        """The CRC of `[0, end)`, descriptors filled in. Raises ValueError for a wrong count."""

    def foreign_descriptors(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """`(offset, slot)` of the descriptors that the writer of one of the ranges between `cuts` cannot fill in.

        They have a byte in a range that begins after the slot does. `WriteJob.finish` takes them as patches.
        """

class WriteJob:
    """Writes ranges of files on threads of its own: each piece is copied, checked and written by one of them.

    Piece by piece in the order of the files; `wait` and `finish` for one file while later ones are being written. Past
    the page cache where the file system can; on tmpfs by storing into huge pages where the system gives them quickly;
    else in pieces of at most 256 KiB. The caller keeps `sources` and buffers
    alive and unchanged until the job is closed or has written them. The job ends with its last reference, too.

    The first error of a file ends the job for it and all later files: each of them raises it. A job belongs to its
    process: in a forked child `close` does nothing and all else raises RuntimeError.
    """

    def __init__(self, *, threads: int, piece_bytes: int, direct: bool = True) -> None:
        """`direct` False: through the page cache everywhere. With O_DIRECT, each thread copies into `piece_bytes`.

        Raises ValueError for `threads` below 1 or `piece_bytes` that are not a multiple of 4096.
        """

    def add_file(
        self,
        path: str | PathLike[str],
        image: FileImage,
        start: int,
        stop: int,
        sources: Sequence[int] | None,
        buffer: int,
        ready: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Adds the bytes `[start, stop)` of a file; returns its number in the job. What is there already is kept.

        Args:
            start, stop: multiples of 4096; `stop` may be the image's end.
            sources: the address of each slot's bytes, any for slots outside the range. Or None:
            buffer: the address, a multiple of 4096, of the byte at `start`; the slots are in place there, the gaps
                belong to the job. 0 with `sources`.
            ready: `(offset, event)`, ascending: what is before the offset in the file is in place when the event (a
                cudaEvent_t) has happened. Empty: all is.

        Raises ValueError for what cannot be meant, RuntimeError after `start`.
        """

    def start(self) -> None:
        """Raises RuntimeError the second time, OSError (EAGAIN) where the system grants no thread."""

    def wait(self, file: int, timeout: float | None = None) -> list[int] | None:
        """The CRCs of the parts of `[start, stop)` once all is written (not yet durable); None after `timeout` seconds.

        Raises OSError (the message has the offset), RuntimeError where the GPU fails, `RuntimeError("cancelled")`,
        RuntimeError before `start`, ValueError for a number that no file has.
        """

    def finish(self, file: int, tail: bytes | None, patches: Sequence[tuple[int, int]] = ()) -> None:
        """Makes a file durable and closes it, on the calling thread, after `wait` has returned.

        Args:
            tail: what comes after the image; the file ends after it. None for a range that does not end the file.
            patches: `(offset, crc)`: 4 little-endian bytes each, put where other writers, now done, have written; with
                a tail only.

        Raises OSError, and the file is closed nevertheless; ValueError; RuntimeError if it is not written or closed.
        """

    def progress(self) -> int:
        """Bytes written so far."""

    def times(self) -> tuple[float, float]:
        """Seconds from the start until all had been copied, and until the last write.

        All had been copied when the last byte was taken from `sources`, the last `ready` event had happened. 0: neither
        was there to wait for.
        """

    def cancel(self) -> None:
        """Ends the job at the next pieces, without waiting for those in flight. What is written may be finished."""

    def close(self) -> None:
        """Cancels what is left, waits for the threads, closes the files. Nothing is in use afterwards."""
