"""The warning of files that no rank has asked for stays cheap if thousands of ranks ask for the files of all ranks."""

from __future__ import annotations

import pytest

from mcore_ckpt.load import stored_parts
from mcore_ckpt.load.stored_parts import PartLoads

RANKS = 2000


def test_runs_that_many_ranks_ask_for_are_expanded_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expanded: list[int] = []
    expand = stored_parts._ranks_in

    def count(runs: object) -> tuple[int, ...]:
        found = expand(runs)  # type: ignore[arg-type]
        expanded.append(len(found))
        return found

    monkeypatch.setattr(stored_parts, "_ranks_in", count)
    loads = PartLoads(saved={"all": [(0, RANKS - 1)], "few": [(0, RANKS - 1)]})
    # A round passes each run as a list.
    loads.warn_of_left([{"all": [[0, RANKS - 1]], "few": [[rank, RANKS - 2]]} for rank in range(RANKS - 1)])  # type: ignore[list-item]
    assert f"part 'few': no load function has asked for what these ranks have saved: {RANKS - 1}." in caplog.text
    assert "part 'all'" not in caplog.text
    assert sum(expanded) <= 4 * RANKS
