"""Which nodes have which files, as the manifest keeps it: read back as written, and refused if it is damaged."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.checkpoint import placement as placements_of_files
from mcore_ckpt.checkpoint.placement import Placement, encoded
from mcore_ckpt.io.json_fields import FieldError


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    names = tuple(draw(st.lists(st.sampled_from(["node1", "node2", "ü"]), min_size=1, max_size=6)))
    some = st.lists(st.integers(0, len(names) - 1), min_size=1, unique=True).map(tuple)
    runs = draw(st.lists(st.tuples(some, st.integers(1, 4)), max_size=6))
    return Placement(names, tuple(nodes for nodes, count in runs for _ in range(count)), draw(st.integers(0, 2**40)))


def decode(item: Any, files: int) -> Placement:
    return placements_of_files.decode(json.dumps(item, separators=(",", ":")).encode(), files)


def as_read(placement: Placement) -> Any:
    return json.loads(json.dumps(encoded(placement)))


@given(placements())
def test_round_trip(placement: Placement) -> None:
    assert decode(as_read(placement), len(placement.by_file)) == placement


@given(placements())
def test_the_files_of_a_node(placement: Placement) -> None:
    on = {node: placement.files_on(node) for node in range(len(placement.nodes) + 1)}
    assert on.pop(len(placement.nodes)) == []
    for position, nodes in enumerate(placement.by_file):
        assert {node for node, files in on.items() if position in files} == set(nodes)
    assert all(files == sorted(files) for files in on.values())


def test_files_of_the_same_nodes_cost_one_entry() -> None:
    """A thousand ranks write six files each, and each node knows the nodes of all."""
    by_file = tuple((rank // 8, (rank // 8 + 1) % 128) for rank in range(1024) for _ in range(6))
    item = encoded(Placement(tuple(f"node{n}" for n in range(128)), by_file))
    assert len(item["files"]) == 128
    assert len(json.dumps(item["files"])) < 3000


@given(placements(), st.integers(-3, 3).filter(bool))
def test_another_number_of_files_is_refused(placement: Placement, more: int) -> None:
    with pytest.raises(FieldError):
        decode(as_read(placement), len(placement.by_file) + more)


GOOD = {"nodes": ["a", "b", "c"], "files": [[2, [0, 1]], [1, [2]]], "save_count": 4}
DAMAGE: dict[str, dict[str, Any]] = {
    "no nodes": {"nodes": None},
    "nodes that are none": {"nodes": [1, 2, 3]},
    "a node with a line end": {"nodes": ["a\n", "b", "c"]},
    "a node too few": {"nodes": ["a", "b"]},
    "no files": {"files": None},
    "files as an object": {"files": {}},
    "a file too many": {"files": [[2, [0, 1]], [2, [2]]]},
    "a file too few": {"files": [[2, [0, 1]]]},
    "an enormous run": {"files": [[2, [0, 1]], [2**61, [2]]]},
    "an empty run": {"files": [[2, [0, 1]], [0, [0]], [1, [2]]]},
    "a negative run": {"files": [[3, [0, 1]], [-1, [0]], [1, [2]]]},
    "a run of a fraction": {"files": [[2, [0, 1]], [1.0, [2]]]},
    "a run of true": {"files": [[2, [0, 1]], [True, [2]]]},
    "an entry that is no list": {"files": [[2, [0, 1]], 1]},
    "an entry of one": {"files": [[2, [0, 1]], [1]]},
    "an entry of three": {"files": [[2, [0, 1]], [1, [2], [0]]]},
    "no list of nodes": {"files": [[2, [0, 1]], [1, 2]]},
    "files on no node": {"files": [[2, [0, 1]], [1, []]]},
    "files twice on one node": {"files": [[2, [0, 0]], [1, [2]]]},
    "files on a node that is none": {"files": [[2, [0, 1]], [1, [3]]]},
    "files on node -1": {"files": [[2, [0, 1]], [1, [-1]]]},
    "files on a node by name": {"files": [[2, [0, 1]], [1, ["c"]]]},
    "no count of steps": {"save_count": None},
    "a negative count": {"save_count": -1},
    "half a count": {"save_count": 0.5},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name: str) -> None:
    assert decode(GOOD, 3) == Placement(("a", "b", "c"), ((0, 1), (0, 1), (2,)), 4)
    with pytest.raises(FieldError):
        decode({**GOOD, **DAMAGE[name]}, 3)


@pytest.mark.parametrize("item", [None, [], "placement", 7])
def test_what_is_no_object_is_refused(item: Any) -> None:
    with pytest.raises(FieldError):
        decode(item, 0)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_any_value_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    item = copy.deepcopy(GOOD)
    holder: Any = item
    key: Any = data.draw(st.sampled_from(sorted(item)))
    while isinstance(holder[key], list) and holder[key] and data.draw(st.booleans()):
        holder, key = holder[key], data.draw(st.integers(0, len(holder[key]) - 1))
    holder[key] = data.draw(anything)
    try:
        placement = decode(item, 3)
    except FieldError:
        return
    assert len(placement.by_file) == 3
    assert decode(as_read(placement), 3) == placement
    assert all(0 <= node < len(placement.nodes) for nodes in placement.by_file for node in nodes)
