"""What the rules of one role keep is not deleted by another role's manager."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.steps.leftovers import remove_leftovers
from mcore_ckpt.steps.listing import list_steps
from mcore_ckpt.steps.retention import PreservationPolicy, judge_together
from mcore_ckpt.steps.role_rules import note_rules, rules_of_others
from tests.doors.test_runs import Training
from tests.support.small_steps import save_small

ROLES = ("actor", "critic")


@pytest.mark.parametrize("remote", [False, True])
def test_managers_with_different_rules(tmp_path: Path, remote: bool) -> None:
    """As verl's workers, each of which has the options of its own role."""
    root, more = tmp_path / "root", {"remote": f"file://{tmp_path}/store"} if remote else {}
    options: dict[str, dict[str, Any]] = {"actor": {"keep_every": 10}, "critic": {}}
    for life in (0, 1):  # the second actor has not started yet when the critic deletes
        trainings = [Training(root, role, roles=ROLES, max_to_keep=1, **options[role], **more) for role in ROLES]
        with closing(trainings[0]) as actor, closing(trainings[1]) as critic:
            if life:
                critic.manager.load()
                actor.manager.load()
            for step in (15, 20) if life else (10, 12):
                for training in (critic, actor) if life else (actor, critic):
                    training.save(step)
    kept = [10, 20]
    assert [status.step for status in list_steps(root)] == kept
    if remote:
        assert sorted(path.name for path in (tmp_path / "store").glob("global_steps_*")) == [
            f"global_steps_{step}" for step in kept
        ]


def test_each_role_decides_about_its_own_optimizer(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        for role in ROLES:
            save_small(tmp_path, step, role=role, roles=ROLES)
    others = {"actor": PreservationPolicy(optimizer_for_last=2)}
    decisions = judge_together(list_steps(tmp_path), PreservationPolicy(optimizer_for_last=1), others, 3)
    assert [each.loses for each in decisions] == [("actor", "critic"), ("critic",), ()]


def test_which_rules_count(tmp_path: Path) -> None:
    for step in (1, 2):
        save_small(tmp_path, step)
    save_small(tmp_path, 3, role="critic")

    def gone(others: dict[str, PreservationPolicy]) -> list[int]:
        decisions = judge_together(list_steps(tmp_path), PreservationPolicy(1), others)
        return [each.status.step for each in decisions if not each.stays]

    assert gone({"actor": PreservationPolicy(2)}) == []
    assert gone({"actor": PreservationPolicy(1)}) == [1]
    reasons = [
        each.reason
        for each in judge_together(list_steps(tmp_path), PreservationPolicy(1), {"actor": PreservationPolicy(2)})
    ]
    assert "by the rules of actor (.actor.retention.json)" in reasons[0]
    assert gone({"critic": PreservationPolicy(5)}) == [1], "the critic has no part in this step"
    assert gone({"actor": PreservationPolicy(optimizer_for_last=1)}) == [1], "it has no rule about steps"


def test_rules_in_a_file(tmp_path: Path) -> None:
    rules = PreservationPolicy(2, keep_every=10, keep_best=("reward", 3, "max"), keep_for=60.0, optimizer_for_last=1)
    note_rules(tmp_path, "actor", rules)
    path = file_names.rules_file(tmp_path, "actor")
    before = path.stat().st_mtime_ns, path.stat().st_ino
    note_rules(tmp_path, "actor", rules)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before, "written only after a change"
    assert rules_of_others(tmp_path, "critic") == {"actor": rules}
    assert rules_of_others(tmp_path, "actor") == rules_of_others(tmp_path / "none", "critic") == {}
    for damage in (b"{", b"[]", b'{"max_to_keep":0}', b'{"max_to_keep":"x"}', b'{"later":1}'):
        path.write_bytes(damage)
        assert rules_of_others(tmp_path, "critic") == {}
    note_rules(tmp_path, "actor", rules)
    assert rules_of_others(tmp_path, "critic") == {"actor": rules}
    note_rules(tmp_path, "actor", PreservationPolicy())
    assert os.listdir(tmp_path) == []


def test_temporary_files_of_a_crash_are_removed(tmp_path: Path) -> None:
    """Rules are replaced, and links to files that were handed over are ended, with temporary files."""
    role_dir = save_small(tmp_path, 1)
    note = file_names.handed_over_note(role_dir, "0" * 32, 0)
    left = [tmp_path / f"..actor.retention.json.{'0' * 32}", note, file_names.handed_over_copy(note)]
    others = tmp_path / f"..critic.retention.json.{'0' * 32}"
    for path in (*left, others):
        path.write_bytes(b"{")
    remove_leftovers(tmp_path, "actor", alone=True)
    assert [path.name for path in left if path.exists()] == []
    assert others.exists(), "the critic may be writing it"
