import ctypes
import random
import sys
import threading
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.io import _native

METHODS = _native.crc32_methods()
MEBIBYTE = 1 << 20
LARGE = random.Random(0).randbytes(3 * MEBIBYTE + 64)
LARGE_BUFFER = ctypes.create_string_buffer(LARGE, len(LARGE))
LARGE_ADDRESS = ctypes.addressof(LARGE_BUFFER)

seeds = st.integers(0, 2**32 - 1)


def address_of(buffer: ctypes.Array) -> int:
    return ctypes.addressof(buffer)


def test_tables_are_everywhere_and_the_default_is_listed_first() -> None:
    assert METHODS[-1] == "tables"
    assert _native.crc32(LARGE_ADDRESS, 100) == _native.crc32_by(METHODS[0], LARGE_ADDRESS, 100)


@pytest.mark.parametrize("method", METHODS)
def test_every_short_length(method: str) -> None:
    for nbytes in range(1100):
        offset = nbytes % 67
        expected = zlib.crc32(LARGE[offset : offset + nbytes], nbytes * 2654435761 & 0xFFFFFFFF)
        assert _native.crc32_by(method, LARGE_ADDRESS + offset, nbytes, nbytes * 2654435761 & 0xFFFFFFFF) == expected


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None)
@given(data=st.binary(max_size=600), offset=st.integers(0, 64), seed=seeds)
def test_any_bytes(method: str, data: bytes, offset: int, seed: int) -> None:
    buffer = ctypes.create_string_buffer(b"\xaa" * offset + data + b"\x55", offset + len(data) + 1)
    assert _native.crc32_by(method, address_of(buffer) + offset, len(data), seed) == zlib.crc32(data, seed)


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None)
@given(start=st.integers(0, 64), difference=st.integers(-300, 300), mebibytes=st.integers(1, 2), seed=seeds)
def test_around_a_mebibyte(method: str, start: int, difference: int, mebibytes: int, seed: int) -> None:
    nbytes = mebibytes * MEBIBYTE + difference
    expected = zlib.crc32(LARGE[start : start + nbytes], seed)
    assert _native.crc32_by(method, LARGE_ADDRESS + start, nbytes, seed) == expected


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None)
@given(cut=st.integers(0, 2000))
def test_the_seed_continues_a_running_value(method: str, cut: int) -> None:
    first = _native.crc32_by(method, LARGE_ADDRESS, cut)
    assert _native.crc32_by(method, LARGE_ADDRESS + cut, 2000 - cut, first) == zlib.crc32(LARGE[:2000])


def test_nothing_leaves_the_seed_as_it_is() -> None:
    assert _native.crc32(0, 0) == 0
    assert _native.crc32(0, 0, 12345) == 12345


@settings(deadline=None)
@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_combine(first: bytes, second: bytes) -> None:
    combined = _native.crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


def test_combine_of_more_bytes_than_fit_in_memory() -> None:
    """Doubling zeros 40 times by combining agrees with one combination of 2**40 zeros."""
    zeros, nbytes = zlib.crc32(b"\0"), 1
    while nbytes < 1 << 40:
        zeros, nbytes = _native.crc32_combine(zeros, zeros, nbytes), 2 * nbytes
    start = zlib.crc32(b"start")
    halves = _native.crc32_combine(start, zeros, nbytes)
    halves = _native.crc32_combine(halves, zeros, nbytes)
    doubled = _native.crc32_combine(zeros, zeros, nbytes)
    assert halves == _native.crc32_combine(start, doubled, 2 * nbytes)


@settings(deadline=None)
@given(
    nbytes=st.integers(0, 20_000),
    block_bytes=st.integers(1, 25_000) | st.sampled_from([64, 512, 4096]),
    threads=st.integers(1, 4),
)
def test_blocks(nbytes: int, block_bytes: int, threads: int) -> None:
    expected = [zlib.crc32(LARGE[i : min(i + block_bytes, nbytes)]) for i in range(0, nbytes, block_bytes)]
    assert _native.crc32_blocks(LARGE_ADDRESS, nbytes, block_bytes, threads) == expected


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 64])
def test_blocks_of_a_mebibyte_combine_to_the_whole(threads: int) -> None:
    blocks = _native.crc32_blocks(LARGE_ADDRESS, len(LARGE), MEBIBYTE, threads)
    assert len(blocks) == 4
    whole = 0
    for i, block in enumerate(blocks):
        whole = _native.crc32_combine(whole, block, min(MEBIBYTE, len(LARGE) - i * MEBIBYTE))
    assert whole == zlib.crc32(LARGE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _native.crc32(0, 1), "null address for 1 bytes"),
        (lambda: _native.crc32_blocks(0, 5, 1), "null address for 5 bytes"),
        (lambda: _native.crc32_blocks(LARGE_ADDRESS, 5, 0), "block_bytes must not be 0"),
        (lambda: _native.crc32_blocks(LARGE_ADDRESS, 5, 1, 0), "threads must be at least 1, not 0"),
        (lambda: _native.crc32_by("abacus", LARGE_ADDRESS, 5), "no CRC method 'abacus'"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: _native.crc32(LARGE_ADDRESS, len(LARGE)),
        lambda: _native.crc32_blocks(LARGE_ADDRESS, len(LARGE), MEBIBYTE, 2),
        lambda: _native.copy_host([LARGE_ADDRESS], [LARGE_ADDRESS + len(LARGE) // 2], [len(LARGE) // 2], 2),
    ],
    ids=["crc32", "crc32_blocks", "copy_host"],
)
def test_other_python_threads_run_meanwhile(call: Callable[[], object]) -> None:
    """With switching turned off in effect, another thread gets its turn only if the native call gives up the GIL."""
    ran, gate = threading.Event(), threading.Lock()
    gate.acquire()

    def other() -> None:
        with gate:
            ran.set()

    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    try:
        thread.start()
        sys.setswitchinterval(1000)
        gate.release()
        # The operating system may let a thread wait for longer than one call takes, but not for ever.
        calls = 0
        while not ran.is_set() and calls < 100_000:
            call()
            calls += 1
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
