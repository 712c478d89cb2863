"""Accounts for every tensor of a source: a conversion writes the tensor, or reports why it leaves the tensor out.

A conversion gives `account` the names of the source's tensors, the names that it writes, and the reasons for leaving
out tensors. A tensor that is neither written nor left out for a known reason would be lost, so the conversion is
refused. The user can allow the loss with `--ignore`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.sharding.patterns import compiled

IGNORED = "named by --ignore"
STATES = "states of transformer-engine (_extra_state), which have no place in HuggingFace's models"
COMPUTED = "computed from config.json"
COPIES = "equal to other tensors, which are written instead"
ZEROS = "zeros, which have no place in megatron"
SCALES = "scales of quantized weights, which are multiplied into the values"
OF_ACTIVATIONS = "scales of activations and of cached keys and values, which have no place in megatron"
BASE = "weights of the base model, which were not trained"
MAYBE_TRAINED = "weights of the base model; the checkpoint does not say whether they were trained"
NOT_LISTED = "files that the index does not list, or that lie beside a whole model.safetensors"


def some_of(names: Collection[str], most: int = 3) -> str:
    """Returns the first names, and the number of the remaining names, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(itertools.islice(names, most)) + more


@dataclass(frozen=True)
class LeftOut:
    """Tensors of a source that a conversion leaves out for one reason.

    If only some rows of a tensor are left out, `tensors` has the tensor's name, followed by the numbers of these rows.
    """

    reason: str
    tensors: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line for the user."""
        return f"left out: {some_of(self.tensors)} ({self.reason})"

    def as_json(self) -> dict[str, Any]:
        """Returns the entry as JSON values."""
        return {"reason": self.reason, "tensors": list(self.tensors)}


Reason = tuple[str, Container[str] | Callable[[str], bool]]
"""A reason to leave out tensors, and the names of the tensors to which the reason applies."""


def account(
    source: Iterable[str], written: Container[str], reasons: Sequence[Reason], refusal: Callable[[list[str]], Exception]
) -> tuple[LeftOut, ...]:
    """Accounts for each tensor of a source. Returns the tensors that are left out, by reason.

    The first reason that applies to a tensor counts. `refusal` returns the error to raise for tensors that are neither
    written nor left out for a reason.

    Example:
        >>> account(["a", "b._extra_state"], {"a"}, [of_states()], lambda lost: ValueError(lost))[0].tensors
        ('b._extra_state',)
    """
    found: dict[str, list[str]] = {}
    lost: list[str] = []
    for name in source:
        if name in written:
            continue
        reason = next((why for why, names in reasons if _holds(name, names)), None)
        (lost if reason is None else found.setdefault(reason, [])).append(name)
    if lost:
        raise refusal(lost)
    return tuple(LeftOut(reason, tuple(names)) for reason, names in found.items())


def _holds(name: str, names: Container[str] | Callable[[str], bool]) -> bool:
    return names(name) if callable(names) else name in names


def matching(reason: str, patterns: Sequence[str]) -> Reason:
    """Returns the reason for the tensors whose whole name matches one of the regular expressions."""
    found = compiled(patterns)
    return reason, lambda name: any(pattern.fullmatch(name) for pattern in found)


def of_states() -> Reason:
    """Returns the reason for the states that transformer-engine keeps in addition to weights."""
    return STATES, lambda name: name.endswith("_extra_state")


def padding_of(name: str, rows: int, tokens: int) -> LeftOut:
    """Describes the rows of a tensor that follow the rows of the vocabulary's tokens."""
    return LeftOut(f"padding of the vocabulary, which has {tokens} tokens", (f"{name} (rows {tokens} to {rows - 1})",))


def together(*parts: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Joins the lists of tensors that several parts of a conversion leave out.

    The result has one entry for each reason.
    """
    found: dict[str, dict[str, None]] = {}
    for each in (each for part in parts for each in part):
        found.setdefault(each.reason, {}).update(dict.fromkeys(each.tensors))
    return tuple(LeftOut(reason, tuple(names)) for reason, names in found.items())
