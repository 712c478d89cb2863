"""What a rank tells rank 0 of its save arrives as it was sent, and rank 0 refuses what is no report."""

import json
from typing import Any

import msgspec
import pytest

from mcore_ckpt.checkpoint.manifest import IndexPlace, WrittenFile
from mcore_ckpt.checkpoint.timeline import SaveTimeline
from mcore_ckpt.errors import CommitError
from mcore_ckpt.save import rank_reports
from mcore_ckpt.save.rank_reports import FileReport, GroupMembers, RankReport, TensorNames
from mcore_ckpt.save.replica_check import DifferentReplicas, ReplicaReport, compare_replicas
from mcore_ckpt.save.save_times import TimesRecord, timeline_of

TIMES = (0, 500_000, 500_000, 1_000_000, 750_000, 2_000_000, 7, 250_000)
FILES = (
    WrittenFile("optim/é.pt", "optimizer", 2**40, 2**32 - 1, IndexPlace(2**39, 500, 8, 2), "d" * 32),
    WrittenFile("optim/common.pt", "common", 0, 0),
)


def report(times: TimesRecord = TIMES, **changed: Any) -> RankReport:
    sent = RankReport(
        files=tuple(map(FileReport.of, FILES)),
        structures={"model/a.pt": "0" * 32},
        names={"d" * 32: "eJw="},
        coordinates=(1, 2, 3, 4, 5, 6, 7),
        stages=((0, 1, (0, 1), (2,)),),
        steps=(3, 2.5, None),
        groups="",
        replicas=ReplicaReport({"label": (1, None)}, {"label": ("a", "b")}, (("c", 0, 1),)),
        times=times,
    )
    return msgspec.structs.replace(sent, **changed)


def test_a_report_arrives_as_it_was_sent() -> None:
    record = json.loads(json.dumps(report().to_record()))
    assert RankReport.of(record) == report()
    assert type(RankReport.of(record).steps[0]) is int
    assert FileReport.of(FILES[0]).index == (2**39, 500, 8, 2)
    # The garbage collector need not look at a dict of texts.
    assert {type(value) for value in record.values()} == {str}


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"files": []},
        {"report": None},
        {"report": "[]"},
        {"report": report().to_record()["report"][:-1]},
        report(coordinates=(1, 2)).to_record(),
        report(files=(FileReport("a", "model", -1, 0, None, ""),)).to_record(),
    ],
)
def test_what_is_no_report_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(CommitError, match="a rank has sent a report that cannot be read"):
        RankReport.of(record)


def test_the_timeline_has_the_times_of_all_ranks() -> None:
    other = (100_000, 200_000, 200_000, 300_000, 300_000, 400_000, 9, None)
    columns = ((0, 100_000), (500_000, 200_000)), ((500_000, 200_000), (1_000_000, 300_000))
    assert timeline_of([TIMES, other], (2_000_000, 2_500_000)) == SaveTimeline(
        (7, 9), *columns, ((750_000, 300_000), (2_000_000, 400_000)), (2_000_000, 2_500_000)
    )
    assert timeline_of([TIMES] * 2, (2_000_000, 2_500_000)).stall is not None


def test_replicas_are_compared_by_list_and_tensor() -> None:
    same, drifted = ReplicaReport({"list": (1, 2, None)}), ReplicaReport({"list": (1, 3, 4)})
    telling = ReplicaReport({"list": (1, 2, None), "alone": (9,)}, {"list": ("a", "b", "c")})
    assert compare_replicas([telling, same]) == ()
    assert compare_replicas([same, drifted, telling]) == (DifferentReplicas("b", ((0, 2), (1,))),)
    assert compare_replicas([same, drifted])[0].tensor == "number 1"
    mended = ReplicaReport(mended=(("d", 5, 3),))
    assert compare_replicas([mended]) == (DifferentReplicas("d", ((3,), (5,))),)


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_lists_arrive_as_they_were_sent(count: int) -> None:
    """Short ones as they are, long ones compressed."""
    lines = [f"decoder.layers.{number}.é.weight" for number in range(count)]
    packed = rank_reports._packed(lines)
    assert rank_reports._lines(rank_reports._unpacked(packed)) == lines
    assert len(packed) < 1500


@pytest.mark.parametrize("entry", ["w[0-999999999]", "w[1-]"])
def test_names_that_no_tensors_have_are_refused(entry: str) -> None:
    names = TensorNames()
    names.receive({"file": rank_reports._packed([entry]), "groups": rank_reports._packed(["\t0\tkey", entry])})
    for ask in (lambda: names.in_order(["file"]), lambda: names.groups(["groups"])):
        with pytest.raises(CommitError, match="a rank has sent a list of names that cannot be names of tensors: "):
            ask()


def test_groups_of_all_ranks_are_joined() -> None:
    names, digests = TensorNames(), []
    for rank in range(3):
        groups = GroupMembers(({0: [f"layers.{rank}.w"], 1: []}, {0: ["head.w"]})).listed([["decay", "none"], ["b"]])
        names.receive(TensorNames().to_send([], rank, groups))
        digests.append(groups.holds)
    wanted = {(0, "decay"): ["layers.[0-2].w"], (0, "none"): [], (1, "b"): ["head.w"]}
    assert names.groups([*digests, ""]) == wanted
