"""What differs between two checkpoints: each kind of difference is found, and nothing else; `mcore-ckpt diff`."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointCorruptError, InvalidArgumentError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.sharding.plan import OPAQUE
from mcore_ckpt.tools.examine import tensor_pairs as module
from mcore_ckpt.tools.examine.diff import Diff, RoleDiff, diff
from mcore_ckpt.tools.examine.differences import DifferentValue, Tolerance, different_values
from tests.support.checkpoints import SHAPES
from tests.support.checkpoints import make as make_version
from tests.support.small_model import make, resharded, tensors_of
from tests.support.stored_tensors import checkpoint, shard

pytestmark = pytest.mark.slow

FC1, FC2 = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc2.weight"

Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even tiny tensors are several."""
    monkeypatch.setattr(module, "_BATCH_BYTES", 96)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return make(tmp_path / "a", tensors_of())


def changed(tmp_path: Path, change: Change, tp: int = 2) -> Path:
    tensors = tensors_of()
    change(tensors)
    return make(tmp_path / "b", tensors, tp=tp)


def the_role(found: Diff) -> RoleDiff:
    (role,) = found.roles
    return role


def set_value(name: str, at: tuple[int, int], value: float) -> Change:
    return lambda tensors: tensors[name].__setitem__(at, value)


def test_another_layout_is_the_same(whole: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = diff(whole, resharded(tmp_path / "a", tmp_path / "c", tp=2, dp=2), progress=lambda *b: told.append(b))
    assert found.is_same
    role = the_role(found)
    assert role.compared == 3 * len(tensors_of())
    assert role.notes == (
        "random states: not compared, because the layouts differ",
        "extra state: not compared, because the layouts differ",
    )
    assert told[-1] == (role.nbytes, role.nbytes)
    assert role.nbytes == 3 * sum(tensor.nbytes for tensor in tensors_of().values())


@pytest.mark.parametrize(("name", "at"), [(FC1, (31, 7)), (FC2, (0, 0)), (FC2, (7, 15))])
def test_one_value(name: str, at: tuple[int, int], whole: Path, tmp_path: Path) -> None:
    """In each kind of cut; the optimizer's state follows from the value in these checkpoints."""
    wanted = float(tensors_of()[name][at])
    found = the_role(diff(whole, changed(tmp_path, set_value(name, at, wanted + 0.5))))
    assert {(each.name, each.kind, each.problem, each.differing) for each in found.tensors} == {
        (name, kind, "values", 1) for kind in ("model", "param", "exp_avg")
    }
    assert found.tensors[0].max_abs == pytest.approx(0.5, rel=1e-5)
    assert not found.values


def test_all_files_of_tensors_that_belong_to_files_are_counted(tmp_path: Path) -> None:
    """Each rank has an `_extra_state` of its own under the same name."""
    states = {0: torch.zeros(3, dtype=torch.uint8), 1: torch.ones(5, dtype=torch.uint8)}
    name = "decoder.layers.0.mlp._extra_state"
    files = {file_names.model_file(tp, 0): [shard(name, state, OPAQUE)] for tp, state in states.items()}
    folder = checkpoint(tmp_path / "actor", files, contents=("model",))
    told: list[tuple[int, int]] = []
    role = the_role(diff(folder, folder, progress=lambda *amounts: told.append(amounts)))
    assert (role.is_same, role.compared, role.nbytes) == (True, 1, 8)
    assert told == [(3, 8), (8, 8)]
    files[file_names.model_file(1, 0)] = [shard(name, states[1] + 1, OPAQUE)]
    other = checkpoint(tmp_path / "other" / "actor", files, contents=("model",))
    (found,) = the_role(diff(folder, other)).tensors
    assert (found.kind, found.problem, found.numel, found.differing) == (OPAQUE, "values", 8, 5)


def test_the_worst_comes_first(whole: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[FC1][0, 0] += 0.25
        tensors[FC2][0, 0] += 0.5

    found = the_role(diff(whole, changed(tmp_path, change))).tensors
    assert [each.name for each in found] == [FC2] * 3 + [FC1] * 3


@pytest.mark.parametrize(
    ("change", "problem", "count"),
    [
        (lambda t: t.pop(FC1), "only in A", 3),
        (lambda t: t.update(new=torch.ones(2, 2)), "only in B", 3),
        (lambda t: t.update({"output_layer.weight": torch.ones(22, 8)}), "shape", 3),
    ],
)
def test_other_tensors(change: Change, problem: str, count: int, whole: Path, tmp_path: Path) -> None:
    found = the_role(diff(whole, changed(tmp_path, change))).tensors
    assert [each.problem for each in found] == [problem] * count


def test_another_dtype(tmp_path: Path) -> None:
    tensors = {name: tensor.round() for name, tensor in tensors_of().items()}
    one = make(tmp_path / "a", tensors)
    other = make(tmp_path / "b", tensors | {FC2: tensors[FC2].double()})
    assert [each.problem for each in the_role(diff(one, other)).tensors] == ["dtype"] * 3
    assert diff(one, other, Tolerance(any_dtype=True)).is_same


def test_tolerances_and_ignored_tensors(whole: Path, tmp_path: Path) -> None:
    other = changed(tmp_path, set_value(FC1, (3, 3), float(tensors_of()[FC1][3, 3]) + 1e-3))
    assert not diff(whole, other).is_same
    assert diff(whole, other, Tolerance(atol=2e-3)).is_same
    assert diff(whole, other, ignored=[r".*\.1\.mlp\.linear_fc1\.weight"]).is_same
    double = make(tmp_path / "c", {name: tensor.double() for name, tensor in tensors_of().items()})
    assert not diff(whole, double).is_same
    assert diff(whole, double, Tolerance(atol=1e-6, any_dtype=True)).is_same


def test_main_parameters_without_bytes_of_their_own(whole: Path, tmp_path: Path) -> None:
    aliased = make(tmp_path / "b", tensors_of(), aliased=True)
    assert diff(whole, aliased).is_same
    assert the_role(diff(aliased, aliased)).compared == 2 * len(tensors_of())


def test_other_values_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 1 << 20)  # these tensors are not tiny
    for step in (2, 3):
        make_version(file_names.step_dir(tmp_path, step) / "actor", step)
    found = the_role(diff(tmp_path / "global_steps_2", tmp_path / "global_steps_3"))
    rng = file_names.rng_file(0, 0, 0, 0)
    assert found.values == (
        DifferentValue(f"{rng}: version", "2", "3"),
        DifferentValue(f"{rng}: seen", "[0, 1]", "[0, 1, 2]"),
    )
    assert len(found.tensors) == 2 * len(SHAPES)


def test_values() -> None:
    left = {"groups": [{"lr": 1.0, "betas": (0.9, 0.95)}], "step": 3, "nan": float("nan"), "t": torch.ones(2)}
    assert list(different_values(left, dict(left), "")) == []
    right = {"groups": [{"lr": 1.0, "betas": (0.9, 0.99)}, {"lr": 2.0}], "step": 3.0, "t": torch.zeros(2)}
    assert list(different_values(left, right, "x")) == [
        DifferentValue("x.groups[0].betas", "(0.9, 0.95)", "(0.9, 0.99)"),
        DifferentValue("x.step", "3", "3.0"),
        DifferentValue("x.nan", "nan", None),
        DifferentValue("x.t", "a tensor of float32 [2]", "a tensor of float32 [2]"),
        DifferentValue("x.groups[1].lr", None, "2.0"),
    ]


def test_roles(tmp_path: Path) -> None:
    both = ("actor", "critic")
    for role in both:
        make(tmp_path / "a", tensors_of(), role=role, roles=both)
    make(tmp_path / "b", tensors_of())
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.is_same, found.only_left, found.only_right) == (False, ("critic",), ())
    step = "global_steps_5"
    assert diff(tmp_path / "a" / step / "critic", tmp_path / "b" / step / "actor").is_same
    make(tmp_path / "c", tensors_of(), role="reward")
    with pytest.raises(InvalidArgumentError, match=r"has actor, critic, .* has reward"):
        diff(tmp_path / "a", tmp_path / "c")


def test_damage_is_an_error(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = changed(tmp_path, lambda tensors: None, tp=1)
    path = other / file_names.model_file(0, 0)
    data = bytearray(path.read_bytes())
    data[4000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="have a wrong CRC"):
        diff(whole, other)
    assert main(["diff", str(whole), str(other)]) == 1
    assert "have a wrong CRC" in capsys.readouterr().err


def test_ctrl_c_ends_it_at_once(tmp_path: Path, ctrl_c: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread goes on with a tensor that may have 10 GB."""
    large = make(tmp_path, {"embedding.word_embeddings.weight": torch.ones(100, 8)})
    told_to_stop = threading.Event()

    class Stop(threading.Event):
        def set(self) -> None:
            super().set()
            told_to_stop.set()

    read, reads = NativeReader.read, list[int]()

    def interrupt(self: NativeReader, ranges: Any, check: bool = True) -> int:
        reads.append(1)
        # Python does not notice a signal that comes just before it begins to wait for a lock, so there are several.
        for _ in range(30 if len(reads) == 1 else 0):
            os.kill(os.getpid(), signal.SIGINT)
            if told_to_stop.wait(1):
                break
        return read(self, ranges, check)

    # Only in this module: threads have events, too.
    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=Stop, Lock=threading.Lock))
    monkeypatch.setattr(module.tuning, "HOST_THREADS", 1)
    monkeypatch.setattr(NativeReader, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        diff(large, large)
    assert len(reads) <= 2  # of one batch on both sides
    for thread in [each for each in threading.enumerate() if each.name.startswith("diff")]:
        # A signal may come while the pool starts a thread, and then the pool does not know it.
        thread.join(10)
        assert not thread.is_alive()
    assert len(reads) <= 2


def test_as_it_is_typed(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = changed(tmp_path, set_value(FC1, (0, 0), 7.0))
    assert main(["diff", str(whole), str(whole)]) == 0
    assert ": the same; " in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith(f"values  {FC1} (exp_avg)  A float32 32x8  B float32 32x8  differing 1 of") for line in lines
    )
    assert main(["diff", str(whole), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["only_a"]) == (False, [])
    assert found["roles"][0]["tensors"][0]["differing"] == 1
    assert found["roles"][0]["tensors"][0]["a"] == {"shape": [32, 8], "dtype": "float32"}
    assert main(["diff", str(whole), str(other), "--most", "1"]) == 1
    assert "and 2 more tensors (--most)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["a", "nowhere"], 2, "nowhere: there is no such folder"),
        (["a", "a", "--atol", "-1"], 2, "use finite numbers of 0 or more"),
        (["a", "a", "--rtol", "inf"], 2, "use finite numbers of 0 or more"),
        (["a", "a", "--ignore", "("], 2, "is no regular expression"),
        (["a/global_steps_5/actor/model", "a"], 2, "is a folder inside a step"),
    ],
)
def test_exit_status(
    arguments: list[str], status: int, text: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *(str(tmp_path / path) for path in arguments[:2]), *arguments[2:]]) == status
    assert text in capsys.readouterr().err
