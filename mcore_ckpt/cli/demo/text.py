"""Reads the text that the demo trains on: the source code of Python's standard library, one token per byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

SEQUENCE_LENGTH = 128
MICRO_BATCH_SIZE = 2
VOCAB_SIZE = 256  # one token per byte

# Stop reading files after this many bytes. The demo does not need more, and each rank loads the whole text.
_LIMIT = 2 << 20
_HELD_OUT_BATCHES = 8

Batch = tuple[torch.Tensor, torch.Tensor]
"""The tokens, and for each token the token that follows. Both are int64, [samples, length]."""


@cache
def _source() -> torch.Tensor:
    """Returns the whole text as one tensor of bytes."""
    source = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source += path.read_bytes()
        if len(source) > _LIMIT:
            break
    return torch.frombuffer(source, dtype=torch.uint8)


def _batch(start: int, device: torch.device) -> Batch:
    size = MICRO_BATCH_SIZE * SEQUENCE_LENGTH
    window = _source()[start : start + size + 1].to(device, torch.int64)
    shape = (MICRO_BATCH_SIZE, SEQUENCE_LENGTH)
    return window[:-1].view(shape), window[1:].view(shape)


class StandardLibraryText(Iterator[Batch]):
    """The text to train on. `position` alone determines the next batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.position = 0

    def __next__(self) -> Batch:
        size = MICRO_BATCH_SIZE * SEQUENCE_LENGTH
        if self.position + size > _held_out_start():
            self.position = 0
        batch = _batch(self.position, self.device)
        self.position += size
        return batch


class HeldOutText(Iterator[Batch]):
    """The end of the text, which is not used for training."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.position = _held_out_start()

    def __len__(self) -> int:
        return _HELD_OUT_BATCHES

    def __next__(self) -> Batch:
        if self.position + MICRO_BATCH_SIZE * SEQUENCE_LENGTH >= len(_source()):
            raise StopIteration
        batch = _batch(self.position, self.device)
        self.position += MICRO_BATCH_SIZE * SEQUENCE_LENGTH
        return batch


def _held_out_start() -> int:
    return len(_source()) - _HELD_OUT_BATCHES * MICRO_BATCH_SIZE * SEQUENCE_LENGTH - 1
