"""The store of a process that works alone answers as torch's store in memory does."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.ranks import single_process_agreement
from mcore_ckpt.ranks.key_value_store import value_of
from mcore_ckpt.ranks.own_store import OwnStore
from mcore_ckpt.ranks.rounds import decide


def everything(store: Any) -> list[Any]:
    """What a store says to each kind of request, to keys that are there and that are not."""
    store.set("text", "a")
    store.set("bytes", b"\x00\xff")
    return [
        *map(store.get, ("text", "bytes")),
        store.multi_get(["bytes", "text"]),
        *map(store.check, ([], ["text"], ["text", "bytes"], ["text", "missing"])),
        *(store.add("count", amount) for amount in (1, 1 << 32, -2)),
        store.get("count"),
        store.compare_set("missing", "b", "c"),
        store.check(["missing"]),
        value_of(store, "missing"),
        store.compare_set("new", "", "d"),
        store.compare_set("new", "", "e"),
        store.compare_set("new", "x", "e"),
        store.compare_set("new", "d", "e"),
        value_of(store, "new"),
        *map(store.delete_key, ("new", "new")),
        store.check(["new"]),
        store.clone().get("text"),
    ]


def test_it_answers_as_torchs_does() -> None:
    assert everything(OwnStore()) == everything(dist.HashStore())  # type: ignore[attr-defined]


@pytest.mark.parametrize("beside", [lambda agreement: agreement, lambda agreement: agreement.for_thread("export")])
def test_a_process_agrees_with_itself(beside: Callable[[Any], Any]) -> None:
    agreement = beside(single_process_agreement("test", 1.0))
    for number in range(3):
        found = decide(agreement, "counting", lambda number=number: {"n": number}, lambda records: {"all": [*records]})
        assert found == {"all": [{"n": number}]}
    agreement.close()
    assert agreement._store._values == {}


def test_a_signal_handler_may_use_it_too() -> None:
    """A trainer may close its manager in one, at any moment."""
    store, calls = OwnStore(), []

    def handler(number: int, frame: object) -> None:
        calls.append(store.add("count", 1))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while len(calls) < 200:
            store.compare_set("key", "", "value")
            store.delete_key("key")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
