"""CRC-32 and copies at the speed of memory; built from csrc/.

Addresses are what `tensor.data_ptr()` returns, sizes are in bytes, streams are raw `cudaStream_t` handles
(`torch.cuda.Stream.cuda_stream`). The caller keeps the memory alive. Everything that takes time releases the GIL.

    crc = crc32(tensor.data_ptr(), tensor.nbytes)
"""

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

def copy_to_host(destinations: list[int], sources: list[int], nbytes: list[int], stream: int) -> None:
    """Copies from GPU to host memory on `stream`, and returns when the stream has done all it was given.

    All GPU addresses belong to one GPU, the stream's. Raises ValueError as `copy_host` does; RuntimeError with CUDA's
    words where CUDA fails, and where the package was built without CUDA.
    """

def copy_to_device(destinations: list[int], sources: list[int], nbytes: list[int], stream: int) -> None:
    """As `copy_to_host`, from host to GPU memory."""
