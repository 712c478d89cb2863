"""`manifest.json`: damage is found, what is forged refused, and only FieldError and NewerFormatError come out."""

import copy
import gc
import json
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mcore_ckpt import json_bounds
from mcore_ckpt.checkpoint import manifest as module
from mcore_ckpt.checkpoint import manifest_text
from mcore_ckpt.checkpoint.manifest import (
    FORMAT_VERSION,
    AdapterSettings,
    FileRecord,
    IndexPlace,
    Manifest,
    NewerFormatError,
    StageRecord,
    decode_manifest,
    decode_summary,
    encode_manifest,
    encode_readable,
)
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.checkpoint.provenance import Commit, Run, RunParent, merged
from mcore_ckpt.checkpoint.timeline import SaveTimeline
from mcore_ckpt.io import json_fields
from mcore_ckpt.io.json_fields import FieldError
from mcore_ckpt.ranks.topology import RankCoordinates, Topology

MODEL = FileRecord(
    "model/mp_rank_00_000/model_states.pt", "model", 0, 5000, 77, IndexPlace(4000, 500, 78), Holds(((0, 1),))
)
COMMON = FileRecord("optim/common.pt", "common", 0, 900, 79)
MANIFEST = Manifest(
    step=7,
    role="actor",
    roles=("actor", "critic"),
    attempt="0badcafe",
    created="2026-01-02T03:04:05Z",
    versions={"torch": "2.13.0", "python": "3.12"},
    contents=("model", "optimizer"),
    topology=Topology(world_size=2, dp=2, edp=2),
    ranks=(RankCoordinates(), RankCoordinates(dp=1, edp=1)),
    stages=(StageRecord(0, 0, (0, 1), (0,)),),
    tensors=("decoder.layers.0.weight", "decoder.layers.ä.weight"),
    files=(MODEL, COMMON),
    model={"num_attention_heads": 4, "activation_func": "silu", "window_size": None, "mrope_section": [1, 2.5, True]},
    save_timeline=SaveTimeline(
        nbytes=(5000, 900),
        plan=((1, 2), (30, 40)),
        copy=((30, 40), (55, 66)),
        write=((40, 50), (700, 800)),
        commit=(700, 950),
        export=((700, 800), (900, 901)),
        stall=(60, 70),
    ),
    placement=Placement(("node1", "node2"), ((1, 0), (0, 1)), 3),
    run=Run("0" * 32, RunParent("1" * 32, 3), "/checkpoints", "node1"),
    commit=Commit(12, "0badf00d", ((1, 9), (11, 12))),
)

# What can be printed.
texts = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=10)
small = st.integers(0, 300)
facts = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
big = st.integers(0, 2**40)
roles = st.text("ab1_-", max_size=6).map(lambda text: "r" + text)


def build(cls: type, values: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return st.builds(cls, **dict.fromkeys(cls.__dataclass_fields__, values))  # type: ignore[attr-defined]


def _coordinates(topology: Topology) -> st.SearchStrategy[RankCoordinates]:
    sizes = {name: getattr(topology, name) for name in RankCoordinates.__dataclass_fields__}
    return st.builds(RankCoordinates, **{name: st.integers(0, size - 1) for name, size in sizes.items()})


@st.composite
def timelines(draw: st.DrawFn, world: int) -> SaveTimeline:
    by_rank = st.lists(big, min_size=world, max_size=world).map(tuple)
    spans = st.tuples(by_rank, by_rank)
    optional = st.none() | spans, st.none() | by_rank
    return draw(st.builds(SaveTimeline, by_rank, spans, spans, spans, st.tuples(big, big), *optional))


@st.composite
def placements(draw: st.DrawFn, files: int) -> Placement:
    names = tuple(draw(st.lists(texts, min_size=1, max_size=4)))
    some = st.lists(st.integers(0, len(names) - 1), min_size=1, unique=True).map(tuple)
    return Placement(names, tuple(draw(st.lists(some, min_size=files, max_size=files))), draw(big))


def runs() -> st.SearchStrategy[Run]:
    return st.builds(Run, texts, st.none() | st.builds(RunParent, texts, big), texts, texts)


def commits() -> st.SearchStrategy[Commit]:
    ranges = st.lists(st.tuples(big, small).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=4)
    return st.builds(Commit, big, st.none() | texts, ranges.map(merged))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    tensors = tuple(draw(st.lists(texts, min_size=1, max_size=5, unique=True)))
    files = []
    for number in range(draw(st.integers(0, 4))):
        first, last = sorted(draw(st.lists(st.integers(0, len(tensors) - 1), min_size=2, max_size=2)))
        index = draw(st.none() | st.builds(IndexPlace, big, big, small))
        size = draw(big) + (index.offset + index.size if index else 0)
        holds = Holds(((first, last),) if index and draw(st.booleans()) else ())
        files.append(FileRecord(f"optim/{number}.pt", draw(texts), 0, size, draw(small), index, holds))
    numbers = st.lists(small, max_size=3).map(tuple)
    world = draw(st.integers(1, 3))
    topology = replace(draw(build(Topology, st.integers(1, world))), world_size=world)
    ranks = tuple(draw(_coordinates(topology)) for _ in range(world))
    return Manifest(
        step=draw(big),
        role=draw(roles),
        roles=tuple(draw(st.lists(roles, max_size=3))),
        attempt=draw(texts),
        created=draw(texts),
        versions=draw(st.dictionaries(texts, texts, max_size=3)),
        contents=tuple(draw(st.lists(texts, max_size=3))),
        topology=topology,
        ranks=ranks,
        stages=tuple(draw(st.lists(st.builds(StageRecord, small, small, numbers, numbers), max_size=3))),
        tensors=tensors,
        files=tuple(files),
        model=draw(st.none() | st.dictionaries(texts, facts, max_size=3)),
        adapters=draw(st.none() | st.builds(AdapterSettings, st.floats(0, 100), st.floats(0, 1))),
        save_timeline=draw(st.none() | timelines(world)),
        placement=draw(st.none() | placements(len(files))),
        run=draw(st.none() | runs()),
        commit=draw(st.none() | commits()),
    )


@settings(deadline=None)
@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    assert data.count(b"\n") == 1


@settings(deadline=None)
@given(manifests())
def test_the_quick_way_reads_what_the_other_way_reads(manifest: Manifest) -> None:
    """The quick way is for bytes that are exactly as written, the other one for any form of the same JSON."""
    data = encode_manifest(manifest)
    assert json_fields.encode(json.loads(data)) == data[:-1]
    spaced = json.dumps(json.loads(data), ensure_ascii=False, indent=1).encode()
    assert manifest_text._canonical(data) is not None
    assert manifest_text._canonical(spaced) is None
    assert decode_manifest(spaced) == manifest
    assert decode_summary(data) == decode_summary(spaced) == manifest.head


@settings(deadline=None)
@given(manifests())
def test_what_is_proved_to_be_readable_is_the_same_text(manifest: Manifest) -> None:
    for _ in range(2):  # what is kept of the first time must not change the second one
        assert encode_readable(manifest) == encode_manifest(manifest)


UNREADABLE = {
    "path-twice": {"files": (MODEL, MODEL)},
    "path-twice-but-for-capitals": {"files": (COMMON, structs.replace(COMMON, path="optim/COMMON.pt"))},
    "path-that-leaves": {"files": (structs.replace(COMMON, path="../common.pt"),)},
    "path-with-a-dot": {"files": (structs.replace(COMMON, path="optim/./common.pt"),)},
    "path-that-ends-with-a-slash": {"files": (structs.replace(COMMON, path="optim/"),)},
    "path-with-a-backslash": {"files": (structs.replace(COMMON, path="optim\\common.pt"),)},
    "path-empty": {"files": (structs.replace(COMMON, path=""),)},
    "path-unprintable": {"files": (structs.replace(COMMON, path="a\u200bb"),)},
    "path-too-long": {"files": (structs.replace(COMMON, path="a/" * 2100 + "b"),)},
    "path-with-a-long-part": {"files": (structs.replace(COMMON, path="optim/" + "é" * 128),)},
    "kind-unprintable": {"files": (structs.replace(COMMON, kind="a\nb"),)},
    "size-negative": {"files": (structs.replace(COMMON, size=-1),)},
    "size-enormous": {"files": (structs.replace(COMMON, size=2**63),)},
    "rank-that-is-none": {"files": (structs.replace(COMMON, rank=2),)},
    "index-leaves-the-file": {"files": (structs.replace(MODEL, size=4499),)},
    "index-negative": {"files": (structs.replace(MODEL, index=IndexPlace(-1, 500, 78)),)},
    "holds-a-tensor-too-many": {"files": (structs.replace(MODEL, holds=Holds(((0, 2),))),)},
    "holds-backwards": {"files": (structs.replace(MODEL, holds=Holds(((1, 0),))),)},
    "holds-a-tensor-twice": {"files": (structs.replace(MODEL, holds=Holds(((0, 0), (0, 1)))),)},
    "tensor-twice": {"tensors": ("a", "a")},
    "tensor-unprintable": {"tensors": ("a", "b\x7f")},
    "tensor-too-long": {"tensors": ("a", "b" * 4097)},
    "rank-beside-the-layout": {"ranks": (RankCoordinates(), RankCoordinates(tp=1, dp=1, edp=1))},
    "rank-negative": {"ranks": (RankCoordinates(), RankCoordinates(dp=-1))},
    "rank-missing": {"ranks": (RankCoordinates(),)},
    "layout-of-no-rank": {"topology": Topology(world_size=2, dp=0)},
    "role-a-path": {"role": "../actor"},
    "step-negative": {"step": -1},
    "timeline-of-one-rank": {"save_timeline": SaveTimeline((1,), ((1,), (1,)), ((1,), (1,)), ((1,), (1,)), (1, 1))},
    "placement-of-fewer-files": {"placement": Placement(("node1",), ((0,),))},
}


@pytest.mark.parametrize("changed", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_back_is_refused_as_it_would_be_read(changed: dict[str, Any]) -> None:
    manifest = replace(MANIFEST, **changed)
    with pytest.raises(FieldError) as reading:
        decode_manifest(encode_manifest(manifest))
    with pytest.raises(FieldError, match=re.escape(str(reading.value))):
        encode_readable(manifest)


@pytest.mark.parametrize(
    "changed",
    [
        {"ranks": MANIFEST.ranks[::-1]},
        {"tensors": MANIFEST.tensors[::-1]},
        {"files": (COMMON, MODEL)},
        {"files": (structs.replace(MODEL, crc32=78), COMMON)},
        {"files": (structs.replace(MODEL, index=IndexPlace(4000, 500, 79)), COMMON)},
        {"files": (structs.replace(MODEL, holds=Holds(((0, 0),))), COMMON)},
        {"files": (MODEL, structs.replace(COMMON, path="optim/other.pt"))},
    ],
)
def test_a_text_that_says_another_thing_is_refused(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    """It can be read, but not as it was meant: the encoder is wrong, or memory has changed meanwhile."""
    other = encode_manifest(replace(MANIFEST, **changed))
    monkeypatch.setattr(module, "_encode", lambda *_: other)
    with pytest.raises(FieldError, match="not decoded as they were encoded"):
        encode_readable(MANIFEST)


def test_runs_whose_text_says_another_thing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_text.typed_json, "encode", lambda value: b"[[0,2]]")
    with pytest.raises(FieldError, match="not decoded as it was encoded"):
        assert Holds(((0, 1),)).text


@pytest.mark.parametrize("digits", [1, 4, 8])
@pytest.mark.parametrize("has_more", [True, False])
@pytest.mark.parametrize("files_of_each", [0, 1])
def test_what_is_written_of_many_ranks_is_read(files_of_each: int, has_more: bool, digits: int) -> None:
    """Whatever takes most of the text: ranks with few files, files, or times of any length."""
    world = 1500
    column = tuple(10**digits - 1 - rank % 10**digits for rank in range(world))
    paths = [f"rng_states/rng_states_pp0_tp0_cp0_dp{rank}.pt" for rank in range(world * files_of_each)]
    manifest = replace(
        MANIFEST,
        topology=Topology(world_size=world, dp=world, edp=world),
        ranks=tuple(RankCoordinates(dp=rank, edp=rank) for rank in range(world)),
        files=(MODEL, COMMON, *(FileRecord(path, "rng", rank, 900, 7) for rank, path in enumerate(paths))),
        save_timeline=SaveTimeline(
            column,
            *[(column, column)] * 3,
            (7, 9),
            (column, column) if has_more else None,
            column if has_more else None,
        ),
        placement=Placement(("node1", "node2"), ((0, 1),) * (2 + len(paths)), 3) if has_more else None,
    )
    data = encode_manifest(manifest)
    assert len(data) > json_bounds.SMALL_BYTES
    assert decode_manifest(data) == manifest


def test_positions_are_held_as_runs() -> None:
    assert list(Holds.of([7, 2, 1, 3, 2])) == [(1, 3), (7, 7)]
    assert Holds.of([]) == Holds()


def test_the_garbage_collector_does_not_look_at_the_files_of_a_manifest() -> None:
    files = decode_manifest(encode_manifest(MANIFEST)).files
    assert not any(map(gc.is_tracked, (*files, *(file.index for file in files))))


def test_files_that_hold_the_same_tensors_share_the_runs() -> None:
    holds = Holds(((0, 0), (2, 3)))
    files = tuple(structs.replace(MODEL, path=f"{number}.pt", holds=holds) for number in range(2))
    decoded = decode_manifest(encode_manifest(replace(MANIFEST, tensors=tuple("abcd"), files=files)))
    assert decoded.files[0].holds == holds
    assert decoded.files[0].holds is decoded.files[1].holds


def test_names_that_look_like_members_are_only_names() -> None:
    """What is cut out of the text or put back may not depend on what names say."""
    names = (',"holds":[[0,1]]', '"holds":', ',"files":[', '],"format":', '],"role":', ',"crc32":1,', "NaN", "}]", "]]")
    manifest = replace(
        MANIFEST,
        tensors=names,
        attempt='],"format":"x',
        created=',"crc32":7,',
        placement=Placement(names, ((8,), (0,))),
    )
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    assert decode_summary(data) == manifest.head


def test_a_summary_is_read_only_of_an_intact_manifest() -> None:
    data = encode_manifest(MANIFEST)
    for at in range(len(data)):
        with suppress(FieldError, NewerFormatError):
            assert decode_summary(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) == decode_summary(data), at
    with pytest.raises(NewerFormatError):
        decode_summary(forged(lambda r: r.update(format_version=FORMAT_VERSION + 1)))
    for edit in ("role-a-path", "one-of-the-roles-a-path", "no-step", "step-true", "another-format"):
        with pytest.raises(FieldError):
            decode_summary(forged(EDITS[edit]))


@pytest.mark.parametrize(
    "value", ["NaN", "[[0],[0,1,1]]", "[[0,0],NaN]", "[[0],[0,0,0]]", '[[0,0]],"holds":[]', "[[0,0]],NaN"]
)
def test_holds_that_are_none_are_refused(value: str) -> None:
    """Even with a checksum that fits, so that the quick way sees them."""
    data = encode_manifest(MANIFEST).replace(b'"holds":[[0,1]]', b'"holds":' + value.encode())
    before, after = re.split(rb',"crc32":\d+(?=,"created")', data[:-1])
    with pytest.raises(FieldError):
        decode_manifest(before + b',"crc32":%d' % zlib.crc32(before + after) + after + b"\n")


def forged(edit: Callable[[dict[str, Any]], Any], manifest: Manifest = MANIFEST) -> bytes:
    """A manifest changed by someone who knows how to make its checksum."""
    record = json.loads(encode_manifest(manifest))
    edit(record)
    record.pop("crc32", None)
    return json_fields.encode(record | {"crc32": zlib.crc32(json_fields.encode(record))})


def test_every_flipped_byte_is_found() -> None:
    data = encode_manifest(MANIFEST)
    for at in range(len(data)):
        # The lowest bit, one that makes other digits and letters of them, the highest, and all.
        for mask in (0x01, 0x02, 0x20, 0x80, 0xFF):
            flipped = data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
            with suppress(FieldError, NewerFormatError):
                assert decode_manifest(flipped) == MANIFEST, (at, mask)


def test_every_cut_is_found() -> None:
    data = encode_manifest(MANIFEST).rstrip()
    for at in range(len(data)):
        with pytest.raises(FieldError):
            decode_manifest(data[:at])


def test_a_newer_format_is_named_before_anything_else_is_read() -> None:
    with pytest.raises(NewerFormatError, match=r"format version 12 is newer than 2.*upgrade"):
        decode_manifest(b'{"format":"mcore_ckpt","format_version":12,"files":"in another form"}')
    with pytest.raises(FieldError, match="checksum"):
        decode_manifest(encode_manifest(MANIFEST).replace(b'"step":7', b'"step":8'))
    assert decode_manifest(forged(lambda r: r.update(format_version=FORMAT_VERSION))) == MANIFEST


@pytest.mark.parametrize("version", [0, -1, 1.0, "1", None, True])
def test_a_version_that_is_none_is_refused(version: Any) -> None:
    with pytest.raises(FieldError):
        decode_manifest(forged(lambda r: r.update(format_version=version)))


@pytest.mark.parametrize(
    "path",
    [
        *("../x.pt", "optim/../../x.pt", "..", ".", "", "/etc/passwd", "//x", "optim//x.pt", "optim/", "./x.pt"),
        *("optim/./x.pt", "optim\\x.pt", "..\\x.pt", "C:\\x.pt"),
    ],
)
def test_a_path_outside_the_folder_is_refused(path: str) -> None:
    with pytest.raises(FieldError, match="not a plain path"):
        decode_manifest(encode_manifest(replace(MANIFEST, files=(MODEL, structs.replace(COMMON, path=path)))))


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "two-files-of-one-path": lambda r: r["files"].append(r["files"][0]),
    "role-a-path": lambda r: r.update(role="../actor"),
    "role-empty": lambda r: r.update(role=""),
    "one-of-the-roles-a-path": lambda r: r.update(roles=["actor", ".."]),
    "role-hidden": lambda r: r.update(roles=["actor", ".actor"]),
    "index-leaves-the-file": lambda r: r["files"][0]["index"].update(size=1001),
    "index-overflows": lambda r: r["files"][0]["index"].update(offset=2**63),
    "index-without-holds": lambda r: r["files"][0].pop("holds"),
    "holds-a-tensor-too-many": lambda r: r["files"][0].update(holds=[[0, 2]]),
    "holds-backwards": lambda r: r["files"][0].update(holds=[[1, 0]]),
    "holds-of-three": lambda r: r["files"][0].update(holds=[[0, 1, 1]]),
    "size-negative": lambda r: r["files"][1].update(size=-1),
    "size-a-float": lambda r: r["files"][1].update(size=900.0),
    "size-enormous": lambda r: r["files"][1].update(size=10**30),
    "rank-none": lambda r: r["files"][1].update(rank=None),
    "ranks-an-object": lambda r: r.update(ranks={}),
    "rank-without-tp": lambda r: r["ranks"][0].pop("tp"),
    "stages-of-numbers": lambda r: r.update(stages=[1, 2]),
    "topology-a-list": lambda r: r.update(topology=[]),
    "versions-of-numbers": lambda r: r.update(versions={"torch": 2}),
    "tensors-of-numbers": lambda r: r.update(tensors=[1, 2]),
    "no-step": lambda r: r.pop("step"),
    "step-true": lambda r: r.update(step=True),
    "adapters-a-list": lambda r: r.update(adapters=[]),
    "adapters-without-alpha": lambda r: r.update(adapters={"dropout": 0.0}),
    "adapters-of-alpha-negative": lambda r: r.update(adapters={"alpha": -1.0, "dropout": 0.0}),
    "run-a-name": lambda r: r.update(run="0badcafe"),
    "run-without-id": lambda r: r["run"].pop("id"),
    "run-with-a-parent-without-step": lambda r: r["run"]["parent"].pop("step"),
    "commit-a-number": lambda r: r.update(commit=12),
    "commit-without-number": lambda r: r["commit"].pop("number"),
    "branch-backwards": lambda r: r["commit"].update(branch=[[9, 1]]),
    "branch-out-of-order": lambda r: r["commit"].update(branch=[[11, 12], [1, 9]]),
    "branch-of-three": lambda r: r["commit"].update(branch=[[1, 2, 3]]),
    "branch-too-long": lambda r: r["commit"].update(branch=[[2 * n, 2 * n] for n in range(257)]),
    "timeline-a-list": lambda r: r.update(save_timeline=[]),
    "timeline-without-plan": lambda r: r["save_timeline"].pop("plan"),
    "timeline-of-one-rank": lambda r: r["save_timeline"].update(bytes=[5000]),
    "timeline-without-ends": lambda r: r["save_timeline"].update(copy=[[30, 40]]),
    "timeline-before-the-call": lambda r: r["save_timeline"].update(commit=[-1, 950]),
    "timeline-of-fractions": lambda r: r["save_timeline"].update(stall=[0.5, 1]),
    "placement-a-list": lambda r: r.update(placement=[]),
    "placement-of-fewer-files": lambda r: r["placement"]["files"].pop(),
    "placement-without-nodes": lambda r: r["placement"].pop("nodes"),
    "another-format": lambda r: r.update(format="torch.dcp"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_is_forged_is_refused(edit: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(FieldError):
        decode_manifest(forged(edit))


def test_unknown_fields_of_this_version_are_passed_over() -> None:
    for name in ('a"b', "a\\b", "a\nb", "é", "zzz", ""):
        assert decode_manifest(forged(lambda r, name=name: r.update({name: [1]}))) == MANIFEST  # type: ignore[misc]
    for path in ("ranks", "files", "stages"):
        for name in ("a", "zzz"):
            assert decode_manifest(forged(lambda r, at=(path, name): r[at[0]][0].update({at[1]: [{}]}))) == MANIFEST  # type: ignore[misc]
    assert decode_manifest(forged(lambda r: r.update(comment="by hand"))) == MANIFEST
    assert decode_manifest(forged(lambda r: r["save_timeline"].update(upload=[[1], [2]]))) == MANIFEST


def test_a_summary_leaves_timeline_and_placement_out() -> None:
    """A listing would otherwise decode a megabyte of numbers for each step of 16,384 ranks."""
    with_them, without = (
        manifest_text.read(encode_manifest(manifest)).small.keys()
        for manifest in (MANIFEST, replace(MANIFEST, save_timeline=None, placement=None))
    )
    assert with_them == without


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in [(*path, key), *places(item, (*path, key))]]


PLACES = places(json.loads(encode_manifest(MANIFEST)))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
).filter(lambda value: "\\ud" not in json.dumps(value))


@settings(deadline=None, max_examples=300)
@given(place=st.sampled_from(PLACES), value=json_values)
def test_any_value_anywhere_is_read_or_refused(place: tuple[Any, ...], value: Any) -> None:
    def put(record: dict[str, Any]) -> None:
        holder: Any = record
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = copy.deepcopy(value)

    try:
        manifest = decode_manifest(forged(put))
    except (FieldError, NewerFormatError):
        return
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert all(not file.path.startswith("/") and ".." not in file.path.split("/") for file in manifest.files)


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 10_000), cut=st.integers(0, 20), put=st.binary(max_size=20))
def test_any_bytes_anywhere_are_refused(at: int, cut: int, put: bytes) -> None:
    data = encode_manifest(MANIFEST)
    at %= len(data)
    with suppress(FieldError, NewerFormatError):
        assert decode_manifest(data[:at] + put + data[at + cut :]) == MANIFEST


def test_text_that_utf8_cannot_hold_is_refused() -> None:
    """JSON may spell half of a surrogate pair: the checksum is made of bytes that cannot exist."""
    data = encode_manifest(MANIFEST).replace(b'"attempt":"0badcafe"', b'"attempt":"\\ud800"')
    with pytest.raises(FieldError):
        decode_manifest(data)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_json_has_not_are_refused(number: bytes) -> None:
    with pytest.raises(FieldError):
        decode_manifest(encode_manifest(MANIFEST).replace(b'"step":7', b'"step":' + number))


def deepest_that_parses() -> int:
    """How deep lists may nest for the parser of this Python."""
    low, high = 1, 400_000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            json_fields.decode(b'{"a":' + nested(middle) + b"}")
            low = middle
        except FieldError:
            high = middle
    return low


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_nesting_that_the_parser_stands_and_what_follows_does_not() -> None:
    """The checksum needs an encoder, a message a repr: either may run out of stack where the parser did not."""
    deepest = deepest_that_parses()
    for depth in {deepest + 1, *range(max(deepest - 60, 1), deepest + 1), 400_000}:
        for data in (
            b'{"format":"mcore_ckpt","format_version":' + nested(depth) + b"}",
            encode_manifest(MANIFEST)[:-2] + b',"note":' + nested(depth) + b"}",
        ):
            with pytest.raises(FieldError):
                decode_manifest(data)
