"""One tensor of a checkpoint: statistics, parts, closest names; and `mcore-ckpt inspect --tensor` as it is typed."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointCorruptError, InvalidArgumentError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.tools.examine import tensor_details as module
from mcore_ckpt.tools.examine.tensor_details import KindDetails, Values, describe_tensor
from tests.support.small_model import make, stored, tensors_of

FC1, FC2 = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"


def of_kind(role_dir: Path, name: str, kind: str) -> KindDetails:
    (found,) = (each for each in describe_tensor(role_dir, name).kinds if each.kind == kind)
    return found


def values_of(role_dir: Path, name: str, kind: str = "model") -> Values:
    found = of_kind(role_dir, name, kind).values
    assert found is not None
    return found


def assert_matches(found: Values, tensor: torch.Tensor) -> None:
    flat = tensor.to(torch.float64).flatten()
    finite = flat[flat.isfinite()]
    assert found.count == flat.numel()
    assert found.zeros == int((flat == 0).sum())
    assert found.nans == int(flat.isnan().sum())
    assert found.infs == int(flat.isinf().sum())
    if not len(finite):
        assert found.minimum is found.maximum is found.mean is found.std is found.norm is None
        return
    assert (found.minimum, found.maximum) == (float(finite.min()), float(finite.max()))
    assert found.mean == pytest.approx(float(finite.mean()), abs=1e-12)
    assert found.std == pytest.approx(float(finite.std(correction=0)), abs=1e-12)
    assert found.norm == pytest.approx(float(finite.norm()))


@pytest.mark.parametrize("batch", [4, 64, 1 << 20])
def test_each_element_counts_once_under_any_layout(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by rows in two sections, cut by columns, and whole on each of two ranks."""
    monkeypatch.setattr(module, "_BATCH_BYTES", batch)
    role_dir = make(tmp_path, tensors_of(), tp=2)
    wanted = stored(role_dir)
    for name in (FC1, FC2, NORM):
        for kind in ("model", "param", "exp_avg"):
            assert_matches(values_of(role_dir, name, kind), wanted[name, kind])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0.0, -0.0, 1.0, float("nan"), float("inf"), float("-inf"), -3.0]),
        torch.tensor([float("nan"), float("inf")]),
        torch.tensor([1e30, 1e30, 1e30]).bfloat16(),
        torch.tensor(7.0),
        torch.arange(5),
        torch.ones(1000) + torch.linspace(0, 1e-6, 1000),
    ],
    ids=["with NaN", "nothing finite", "large", "one element", "integers", "almost equal"],
)
def test_values(tensor: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 16)
    name = "decoder.final_layernorm.weight"
    role_dir = make(tmp_path, {name: tensor}, aliased=True)
    assert_matches(values_of(role_dir, name), tensor)


def test_it_reads_a_batch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 256)
    sizes, read = [], NativeReader.read

    def spy(self: NativeReader, ranges: list[tuple[object, torch.Tensor]], check: bool = True) -> int:
        assert check
        sizes.append(max(memory.untyped_storage().nbytes() for _, memory in ranges))
        return read(self, ranges, check)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeReader, "read", spy)
    told: list[tuple[int, int]] = []
    describe_tensor(make(tmp_path, tensors_of(), tp=2), FC2, lambda *bytes_: told.append(bytes_))
    assert max(sizes) == 256
    assert len(sizes) == 3 * 2
    assert told[-1] == (3 * 512, 3 * 512)


def test_no_rows_have_no_pieces() -> None:
    assert list(module._pieces(Rows(0, 0, 0), 0)) == []


@given(row=st.integers(1, 9), rows=st.integers(1, 9), apart=st.integers(0, 5), most=st.integers(1, 20))
def test_pieces_have_each_element_once(row: int, rows: int, apart: int, most: int) -> None:
    whole = Rows(3, 0, row, rows, row + apart if rows > 1 else 0, row + apart + 2 if rows > 1 else 0)

    def elements(of: Rows) -> list[int]:
        return [of.start + number * of.source_stride + at for number in range(of.rows) for at in range(of.row)]

    pieces = list(module._pieces(whole, most))
    assert [element for piece in pieces for element in elements(piece)] == elements(whole)
    for piece in pieces:
        assert piece.numel <= most
        assert piece.destination == 0
        assert piece.rows == 1 or piece.destination_stride == piece.row


def test_parts_say_which_rank_has_what(tmp_path: Path) -> None:
    role_dir = make(tmp_path, tensors_of(), tp=2)
    rows, columns = of_kind(role_dir, FC1, "model").parts, of_kind(role_dir, FC2, "param").parts
    assert [(part.rank, part.coordinates.tp) for part in rows] == [(0, 0), (1, 1)]
    assert [[(box.offset, box.shape) for box in part.boxes] for part in rows] == [
        [((0, 0), (8, 8)), ((16, 0), (8, 8))],
        [((8, 0), (8, 8)), ((24, 0), (8, 8))],
    ]
    assert [[(box.offset, box.shape) for box in part.boxes] for part in columns] == [
        [((0, 0), (8, 8))],
        [((0, 8), (8, 8))],
    ]
    for part in rows:
        data = (role_dir / part.file).read_bytes()[part.offset : part.offset + part.nbytes]
        tensor = torch.frombuffer(bytearray(data), dtype=torch.float32)
        first = part.boxes[0]
        wanted = tensors_of()[FC1][first.offset[0] : first.offset[0] + first.shape[0]]
        assert torch.equal(tensor[: wanted.numel()], wanted.flatten())


def test_a_main_parameter_without_bytes_is_the_model_s(tmp_path: Path) -> None:
    role_dir = make(tmp_path, tensors_of(), aliased=True)
    param = of_kind(role_dir, FC1, "param")
    assert (param.same_as, param.values) == ("model", None)
    assert param.parts == of_kind(role_dir, FC1, "model").parts


def test_damage_is_an_error(tmp_path: Path) -> None:
    role_dir = make(tmp_path, tensors_of())
    part = of_kind(role_dir, FC1, "model").parts[0]
    path = role_dir / part.file
    data = bytearray(path.read_bytes())
    data[part.offset + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=rf"{FC1}: bytes .* have a wrong CRC"):
        describe_tensor(role_dir, FC1)
    describe_tensor(role_dir, FC2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("decoder.layers.1.mlp.linear_fc1.weigth", rf"the closest are {re.escape(FC1)}, "),
        ("linear_fc1", r"the closest are decoder\.layers\.0\.mlp\.linear_fc1\.weight, .* and 1 more"),
        ("zzz", "list all tensors with --tensors"),
    ],
)
def test_the_closest_names(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        describe_tensor(make(tmp_path, tensors_of()), name)


def test_as_it_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, tensors_of(), tp=2)
    assert main(["inspect", str(tmp_path), "--tensor", FC1]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("model  float32 [32, 8]  count 256  zeros 0  NaN 0  Inf 0  min ")
    assert re.match(r"model  rank 1 \(pp0 tp1 cp0 dp0\)  \[8:16, 0:8\] \+ \[24:32, 0:8\]  model/.*bytes \[", lines[3])
    assert main(["inspect", str(tmp_path), "--tensor", FC1, "--json"]) == 0
    tensor = json.loads(capsys.readouterr().out)["roles"][0]["tensor"]
    assert [kind["kind"] for kind in tensor["kinds"]] == ["model", "param", "exp_avg"]
    assert tensor["kinds"][0]["values"]["count"] == 256
    assert tensor["kinds"][0]["parts"][1]["boxes"][0] == {"offset": [8, 0], "shape": [8, 8]}
    assert main(["inspect", str(tmp_path), "--tensor", "nothing.like.it"]) == 2
    assert "has no tensor" in capsys.readouterr().err
