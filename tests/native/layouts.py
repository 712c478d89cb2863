"""Files of any layout, in plain Python: what the native engine must agree with."""

import itertools
import random
import struct
import zlib
from dataclasses import dataclass, field

from hypothesis import strategies as st

from mcore_ckpt.io import _native

PAGE = 4096


@dataclass
class Reference:
    """A file with its payload. `sizes[i]` bytes of payload follow `before[i]` bytes of gap."""

    sizes: list[int]
    before: list[int]
    last_gap: int
    block_bytes: int
    seed: int = 0
    offsets: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    gaps: list[tuple[int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        data, random_bytes = bytearray(), random.Random(self.seed).randbytes
        payload_ends = []
        for size, gap in zip([*self.sizes, 0], [*self.before, self.last_gap], strict=True):
            if gap:
                self.gaps.append((len(data), random_bytes(gap)))
                data += self.gaps[-1][1]
            self.offsets.append(len(data))
            data += random_bytes(size)
            payload_ends.append(len(data))
        self.end = self.offsets.pop()
        for size, end, gap in zip(self.sizes, payload_ends, [*self.before[1:], self.last_gap], strict=False):
            self.descriptors.append(end + gap - 4 if gap >= 4 and (size or gap % 2) else -1)
        self.payloads = [bytes(data[o : o + n]) for o, n in zip(self.offsets, self.sizes, strict=True)]
        self.slot_crcs = [zlib.crc32(payload) for payload in self.payloads]
        for at, crc in zip(self.descriptors, self.slot_crcs, strict=True):
            if at >= 0:
                struct.pack_into("<I", data, at, crc)
        self.data = bytes(data)

    def layout(self) -> _native.FileLayout:
        return _native.FileLayout(self.offsets, self.sizes, self.descriptors, self.gaps, self.end, self.block_bytes)

    def blocks(self) -> list[tuple[int, int]]:
        return [
            (at, min(at + self.block_bytes, offset + size))
            for offset, size in zip(self.offsets, self.sizes, strict=True)
            for at in range(offset, offset + size, self.block_bytes)
        ]

    def part_crcs(self, start: int, stop: int) -> list[int]:
        cut = [(max(begin, start), min(end, stop)) for begin, end in self.blocks()]
        return [zlib.crc32(self.data[begin:end]) for begin, end in cut if begin < end]

    def foreign(self, cuts: list[int]) -> list[tuple[int, int]]:
        found = []
        for slot, at in enumerate(self.descriptors):
            begins = [begin for begin, end in itertools.pairwise(cuts) if begin < at + 4 and at < end]
            if at >= 0 and any(begin > self.offsets[slot] for begin in begins):
                found.append((at, slot))
        return sorted(found)


@st.composite
def references(draw: st.DrawFn, largest: int = 20_000) -> Reference:
    sizes = draw(st.lists(st.sampled_from([0, 1, 63, 4096, 8192]) | st.integers(0, largest), max_size=8))
    gaps = [draw(st.integers(0, 40) | st.sampled_from([4096, 4094])) for _ in sizes]
    return Reference(
        sizes, gaps, draw(st.integers(4, 5000)), draw(st.sampled_from([1000, 4096, 10_000])), draw(st.integers(0, 99))
    )


@st.composite
def page_cuts(draw: st.DrawFn, end: int) -> list[int]:
    pages = draw(st.lists(st.integers(0, end // PAGE), max_size=3))
    return [0, *sorted(page * PAGE for page in pages), end]
