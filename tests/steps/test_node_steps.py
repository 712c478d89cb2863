"""Which steps of the fast tier are whole, from what each node's folder has."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, ManifestSummary, WrittenFile, encode_manifest
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.checkpoint.provenance import Commit
from mcore_ckpt.steps.choice import choose
from mcore_ckpt.steps.node_steps import (
    FastCheckpoint,
    HeldRole,
    NodeStep,
    fast_checkpoints,
    held_roles,
    node_steps,
    safest,
    whole_steps,
)
from mcore_ckpt.tools.maintain.collect import find_steps
from tests.support.checkpoints import manifest_of

FILES = 5


def manifest(step: int = 7, role: str = "actor", roles: Sequence[str] = ("actor",), attempt: str = "a") -> Manifest:
    """Of `FILES` files, of which number n has 10 + n bytes."""
    files = [(0, WrittenFile(f"rng_states/{number}.pt", "rng", 10 + number, 0)) for number in range(FILES)]
    found = manifest_of(files, 1, step, attempt * 32, role, roles)
    return replace(found, placement=Placement(("node1",), ((0,),) * FILES, save_count=3))


def put(folder: Path, manifest: Manifest, has: Sequence[int] = range(FILES), is_committed: bool = True) -> Path:
    """Puts some files of a checkpoint into a node's folder."""
    role_dir = file_names.step_dir(folder, manifest.step) / manifest.role
    place = role_dir if is_committed else file_names.staging_dir(role_dir, manifest.attempt)
    (place / "rng_states").mkdir(parents=True)
    for number in has:
        (place / manifest.files[number].path).write_bytes(b"x" * manifest.files[number].size)
    (place / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return place


def together(*folders: Path) -> list[FastCheckpoint]:
    """What the nodes with these folders have, sent as records."""
    sent = [json.loads(json.dumps([held.to_record() for held in held_roles(folder)])) for folder in folders]
    return fast_checkpoints((number, [HeldRole.of(item) for item in held]) for number, held in enumerate(sent))


# -- one node's folder ----------------------------------------------------------------------------------------


def test_what_a_node_has(tmp_path: Path) -> None:
    put(tmp_path, manifest(), [0, 1, 3])
    created = "2025-01-01T00:00:00+00:00"
    head = ManifestSummary(7, "actor", ("actor",), "a" * 32, created, contents=("model", "extra"))
    held = HeldRole(head, FILES, ((0, 1), (3, 3)), True, save_count=3)
    assert held_roles(tmp_path) == [held]
    assert [HeldRole.of(held.to_record()) for held in held_roles(tmp_path)] == held_roles(tmp_path)


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    assert held_roles(tmp_path) == held_roles(tmp_path / "nowhere") == []
    assert together() == []


def test_only_whole_files_count(tmp_path: Path) -> None:
    """Not partial ones, nor those of another size, nor folders of that name."""
    place = put(tmp_path, manifest())
    files = [place / file.path for file in manifest().files]
    os.rename(files[0], file_names.partial_file(place, manifest().files[0].path, 0))
    os.truncate(files[1], 10)
    os.truncate(files[2], 13)
    files[3].unlink()
    files[3].mkdir()
    (held,) = held_roles(tmp_path)
    assert held.has == ((4, 4),)


def test_a_save_that_died_while_it_committed(tmp_path: Path) -> None:
    """Its staging folder counts from when it has the manifest."""
    staging = put(tmp_path, manifest(), is_committed=False)
    (held,) = held_roles(tmp_path)
    assert (held.has, held.is_committed) == (((0, FILES - 1),), False)
    (staging / file_names.MANIFEST_FILE).unlink()
    assert held_roles(tmp_path) == []


def test_other_folders_are_nothing(tmp_path: Path) -> None:
    place = put(tmp_path, manifest())
    for name in (".actor.replaced-" + "a" * 32, ".actor.uploading-" + "a" * 32, ".hidden", "global_steps_7"):
        os.rename(place, place.with_name(name))
        assert held_roles(tmp_path) == []
        os.rename(place.with_name(name), place)
    os.rename(place.parent, tmp_path / "iter_0000007")
    assert held_roles(tmp_path) == []


OTHERS = {
    "step": manifest(step=8),
    "role": manifest(role="critic"),
    "root": replace(manifest(), placement=None),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_manifest_of_something_else(tmp_path: Path, other: Manifest) -> None:
    """Copied by hand, perhaps from the root. Other nodes would ask for its files at another place."""
    place = put(tmp_path, manifest())
    (place / file_names.MANIFEST_FILE).write_bytes(encode_manifest(other))
    assert held_roles(tmp_path) == []


def test_a_staging_folder_of_another_save(tmp_path: Path) -> None:
    place = put(tmp_path, manifest(), is_committed=False)
    (place / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest(attempt="b")))
    assert held_roles(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "nonsense", "folder", "pipe", "loop"])
def test_a_damaged_manifest_costs_only_its_own_checkpoint(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, manifest(step=6))
    path = put(tmp_path, manifest()) / file_names.MANIFEST_FILE
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes({"cut": data[:-9], "empty": b"", "nonsense": b"\xff"}[damage])
    with caplog.at_level(logging.WARNING):
        assert [held.head.step for held in held_roles(tmp_path)] == [6]
    assert f"{path.parent}: is left out" in caplog.text


def test_files_where_folders_should_be(tmp_path: Path) -> None:
    """And a step whose folder is a link that leads nowhere, or was deleted in this moment."""
    put(tmp_path, manifest(step=6))
    file_names.step_dir(tmp_path, 7).symlink_to(tmp_path / "nowhere")
    file_names.step_dir(tmp_path, 8).write_bytes(b"")
    (file_names.step_dir(tmp_path, 6) / "critic").write_bytes(b"")
    assert [held.head.step for held in held_roles(tmp_path)] == [6]


@pytest.mark.parametrize(
    ("copies", "replicas", "expected"),
    [
        ({9: 0, 8: 1, 7: 1}, 1, [8, 7]),  # step 9 has no copies yet
        ({9: 0, 8: 1, 7: 2}, 2, [7]),
        ({9: 0, 8: 1}, 2, [8]),  # a node was lost, or there were fewer replicas before
        ({9: 0, 8: 0}, 1, [9, 8]),
        ({9: 1}, 0, [9]),
        ({}, 1, []),
    ],
)
def test_the_steps_that_lost_nodes_take_last(
    tmp_path: Path, copies: dict[int, int], replicas: int, expected: list[int]
) -> None:
    """In each, file n is on node n modulo 3 and on so many next nodes; a step that is not whole has the most."""
    for step, count in copies.items():
        for node in range(3):
            has = [n for n in range(FILES) if (node - n) % 3 <= count]
            put(tmp_path / str(node), manifest(step, attempt=f"{step}"), has)
    for node in range(3):
        put(tmp_path / str(node), manifest(5, attempt="5"), range(1, FILES))
    found = together(*(tmp_path / str(node) for node in range(3)))
    assert [each.step for each in safest(found, replicas)] == expected


# -- all nodes together ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sets(st.integers(0, FILES - 1)), st.booleans()), min_size=1, max_size=4))
def test_a_checkpoint_is_whole_if_all_its_files_are_somewhere_and_it_is_committed(
    tmp_path_factory: pytest.TempPathFactory, nodes: list[tuple[set[int], bool]]
) -> None:
    root = tmp_path_factory.mktemp("nodes")
    for number, (has, is_committed) in enumerate(nodes):
        put(root / str(number), manifest(), sorted(has), is_committed)
    (found,) = together(*(root / str(number) for number in range(len(nodes))))
    there = set().union(*(has for has, _ in nodes))
    committed = [is_committed for _, is_committed in nodes]
    assert found.missing == [number for number in range(FILES) if number not in there]
    assert (found.is_committed, found.is_staged) == (any(committed), not all(committed))
    assert found.is_complete == (any(committed) and len(there) == FILES)
    assert found.nodes_of_rarest_file == min(sum(n in has for has, _ in nodes) for n in range(FILES))
    assert set(whole_steps([found], ["actor"])) == ({7} if found.is_complete else set())
    for number, has in found.holders:
        assert {n for first, last in has for n in range(first, last + 1)} == nodes[number][0]


def test_the_newest_step_is_the_first(tmp_path: Path) -> None:
    for step in (9, 7, 12, 8):
        put(tmp_path / str(step % 2), manifest(step=step))
    assert [found.step for found in together(tmp_path / "0", tmp_path / "1")] == [12, 9, 8, 7]


def test_a_step_needs_all_its_roles_and_those_asked_for(tmp_path: Path) -> None:
    roles = ("actor", "critic")
    put(tmp_path / "0", manifest(role="actor", roles=roles))
    put(tmp_path / "1", manifest(role="critic", roles=roles), [0, 1])
    assert whole_steps(together(tmp_path / "0", tmp_path / "1"), ["actor"]) == {}
    put(tmp_path / "2", manifest(role="critic", roles=roles), [2, 3, 4])
    found = together(*(tmp_path / str(number) for number in range(3)))
    assert set(whole_steps(found, ["actor"])[7].found) == set(roles)
    assert whole_steps(found, ["actor", "ref"]) == {}
    assert set(whole_steps(found, [])) == {7}


def committed(role: str, step: int, number: int, *branch: tuple[int, int]) -> Manifest:
    made = manifest(step, role, ("actor", "critic"), attempt=f"{number}")
    return replace(made, commit=Commit(number, None, branch))


def chosen(folder: Path) -> list[int]:
    """What recover tries, on ranks that have got what rank 0 has found."""
    roles = ("actor", "critic")
    steps = node_steps(together(folder), roles, lambda checkpoint: "lost")
    received = [NodeStep.of(json.loads(json.dumps(each.to_record()))) for each in steps]
    assert [each.step for each in choose(received, roles).steps] == [each.step for each in choose(steps, roles).steps]
    return [each.step for each in choose(steps, roles).steps]


def test_after_a_rollback_the_last_commit_decides_and_not_what_is_whole(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        put(tmp_path, committed(role, 90, 1, (1, 1)))
        put(tmp_path, committed(role, 100, 2, (1, 2)))
    assert chosen(tmp_path) == [100, 90]
    put(tmp_path, committed("actor", 95, 3, (1, 1), (3, 3)), [0])
    assert chosen(tmp_path) == [90, 100]
    assert [found.step for found in find_steps([tmp_path])] == [95, 90, 100]


def test_a_step_of_two_branches_is_not_whole(tmp_path: Path) -> None:
    put(tmp_path, committed("actor", 100, 3, (1, 1), (3, 3)))
    put(tmp_path, committed("critic", 100, 2, (1, 2)))
    assert chosen(tmp_path) == []
    (step,) = whole_steps(together(tmp_path), []).values()
    assert "not committed again by critic" in step.reason
    (found,) = find_steps([tmp_path])
    assert found.problems == ("critic: belongs to a branch that another role of the step has given up",)


def test_one_role_declares_the_others(tmp_path: Path) -> None:
    put(tmp_path, manifest(role="actor"))
    put(tmp_path, manifest(role="critic", roles=("actor", "critic", "ref")))
    assert whole_steps(together(tmp_path), ["actor"]) == {}


@pytest.mark.parametrize("renumbered", [False, True])
def test_the_second_of_two_saves_of_a_step_that_some_nodes_have_not_committed(tmp_path: Path, renumbered: bool) -> None:
    """Whatever the clocks say. The first is about to be replaced on the node that still has it."""
    first = replace(manifest(attempt="a"), created="2025-01-02T00:00:00+00:00")
    put(tmp_path / "0", manifest(attempt="b"), [0, 1, 2])
    put(tmp_path / "1", manifest(attempt="b"), [3, 4], is_committed=False)
    put(tmp_path / "1", first)
    folders = [tmp_path / "0", tmp_path / "1"]
    found = together(*(reversed(folders) if renumbered else folders))
    assert [each.is_complete for each in found] == [True, True]
    assert whole_steps(found, ["actor"])[7].found["actor"].attempt == "b" * 32


@pytest.mark.parametrize("renumbered", [False, True])
def test_the_second_of_two_saves_of_a_step_while_a_node_was_away(tmp_path: Path, renumbered: bool) -> None:
    put(tmp_path / "0", manifest(attempt="a"))
    put(tmp_path / "1", replace(manifest(attempt="b"), created="2025-01-01T00:00:01+00:00"))
    folders = [tmp_path / "0", tmp_path / "1"]
    found = together(*(reversed(folders) if renumbered else folders))
    assert whole_steps(found, ["actor"])[7].found["actor"].attempt == "b" * 32


def test_the_files_of_two_saves_of_a_step_do_not_make_one(tmp_path: Path) -> None:
    put(tmp_path / "0", manifest(attempt="a"), [0, 1, 2])
    put(tmp_path / "1", manifest(attempt="b"), [3, 4])
    found = together(tmp_path / "0", tmp_path / "1")
    assert [len(each.missing) for each in found] == [2, 3]
    assert whole_steps(found, ["actor"]) == {}


def test_of_two_saves_of_a_step_the_one_that_is_whole_counts(tmp_path: Path) -> None:
    put(tmp_path / "0", manifest(attempt="a"))
    put(tmp_path / "1", manifest(attempt="b"), [3, 4])
    found = together(tmp_path / "0", tmp_path / "1")
    assert whole_steps(found, ["actor"])[7].found["actor"].attempt == "a" * 32
