"""Whether a node's folder has space for the fast tier: what it needs, and what it has already."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import NoRoomError
from mcore_ckpt.fast import tier
from mcore_ckpt.fast.tier import _held_bytes, promise_space
from mcore_ckpt.ranks.node_map import NodeMap


def test_what_saves_that_died_have_left_counts_as_space(tmp_path: Path) -> None:
    """Else a run could not start again where it has fitted until it died in a save."""
    attempt = "a" * 32
    for step, role in ((1, "actor"), (2, "actor"), (2, "critic")):
        role_dir = file_names.step_dir(tmp_path, step) / role
        for folder in (role_dir, file_names.staging_dir(role_dir, attempt), file_names.replaced_dir(role_dir, attempt)):
            (folder / "model").mkdir(parents=True)
            (folder / "model/0.pt").write_bytes(bytes(100 if role == "actor" else 7))
    (tmp_path / "notes").write_bytes(bytes(1000))
    assert _held_bytes(tmp_path, "actor") == 2 * 3 * 100
    assert _held_bytes(tmp_path, "critic") == 3 * 7
    assert _held_bytes(tmp_path / "none", "actor") == 0


def test_a_node_needs_space_for_all_its_ranks_and_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = NodeMap.of(["a", "a", "b", "b"], ["a", "a", "b", "b"])
    config = SimpleNamespace(keep=1, replicas=1, durable_every=None)
    here: Any = SimpleNamespace(nodes=nodes, config=config, folder=Path("/dev/shm/run"), agreement=None)

    def needs(free: int) -> None:
        records = [{"own": own, "free": free, "memory": True} for own in (10, 20, 1, 2)]

        def decide(agreement: Any, topic: str, work: Callable[[], Any], combine: Callable[[Any], Any]) -> None:
            combine(records)

        monkeypatch.setattr(tier, "decide", decide)
        promise_space(here.agreement, here, lambda: 0)

    needs(4 * (30 + 3))
    with pytest.raises(NoRoomError, match=r"on a would .* 4 steps .* of 30 bytes of its ranks and 3 bytes of copies"):
        needs(4 * (30 + 3) - 1)
