"""Leaves a critic's head out of a load from a language model, whose head has one row per token.

slime starts a critic from the actor's weights, and then initializes its head again
(`_critic_output_layer_needs_reinit`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_head(chunks: Sequence[Any]) -> Iterator[None]:
    """Freezes the head of a model, so that a load with `skip_frozen` leaves it as it is."""
    heads = [
        parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if ".output_layer." in f".{name}" and parameter.requires_grad
    ]
    for head in heads:
        head.requires_grad_(False)
    try:
        yield
    finally:
        for head in heads:
            head.requires_grad_(True)
