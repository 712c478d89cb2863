"""Two models compared: each kind of difference is found, and nothing else; and `mcore-ckpt test` as it is typed."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError
from mcore_ckpt.tools.examine import tensor_pairs as module
from mcore_ckpt.tools.examine.compare import ComparedTensor, Comparison, compare, open_folder
from mcore_ckpt.tools.examine.differences import Differences, Tolerance
from tests.support.tiny_models import make_hf_folder, make_hf_model
from tests.tools.test_foreign_models import STAGES, mcore_of, save_verl

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]
NAMES = ("model.embed_tokens.weight", "lm_head.weight", "a", "b")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even tiny tensors are several."""
    monkeypatch.setattr(module, "_BATCH_BYTES", 64)


def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    shapes = ((7, 5), (7, 5), (33,), (4, 3, 2))
    return {name: torch.randn(shape, generator=generator) for name, shape in zip(NAMES, shapes, strict=True)}


def save(folder: Path, state: Tensors) -> Path:
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def compared(tmp_path: Path, ours: Tensors, reference: Tensors, *args: Any) -> Comparison:
    return compare(open_folder(save(tmp_path / "a", ours)), open_folder(save(tmp_path / "b", reference)), *args)


def the_one(comparison: Comparison, name: str) -> ComparedTensor:
    """All others must be the same."""
    assert [tensor.name for tensor in comparison.tensors if not tensor.is_same] == [name]
    assert not comparison.is_same
    (found,) = (tensor for tensor in comparison.tensors if tensor.name == name)
    assert comparison.worst()[0] == found
    return found


def test_the_same(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = compared(tmp_path, tensors(), tensors(), Tolerance(), (), lambda *bytes_: told.append(bytes_))
    assert found.is_same
    assert found.worst() == []
    assert {tensor.name for tensor in found.tensors} == set(NAMES)
    nbytes = sum(tensor.nbytes for tensor in tensors().values())
    assert found.nbytes == nbytes
    assert sorted(told)[-1] == (nbytes, nbytes)


@pytest.mark.parametrize("index", [0, 15, 16, 32])
def test_a_value(index: int, tmp_path: Path) -> None:
    """In each piece of a tensor."""
    ours, reference = tensors(), tensors()
    reference["a"][index] = 2.0
    ours["a"][index] = 2.5
    found = the_one(compared(tmp_path, ours, reference), "a")
    assert (found.problem, found.differing, found.max_abs, found.max_rel) == ("values", 1, 0.5, 0.25)


def test_the_worst_of_several(tmp_path: Path) -> None:
    ours, reference = tensors(), tensors()
    ours["a"] += 1
    ours["b"] += 2
    found = compared(tmp_path, ours, reference)
    assert [tensor.name for tensor in found.worst()] == ["b", "a"]
    assert found.worst()[0].differing == 24


@pytest.mark.parametrize(
    ("ours", "reference", "max_abs"),
    [
        (0.0, -0.0, 0.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.inf, 1.0, math.inf),
        (math.inf, -math.inf, math.inf),
        (struct.unpack("<f", b"\x01\x00\xc0\x7f")[0], math.nan, 0.0),
    ],
)
def test_values_that_numbers_do_not_tell_apart(ours: float, reference: float, max_abs: float, tmp_path: Path) -> None:
    found = the_one(compared(tmp_path, {"a": torch.tensor([ours])}, {"a": torch.tensor([reference])}), "a")
    assert (found.problem, found.differing, found.max_abs) == ("values", 1, max_abs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0])
@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance(atol=1e-6, rtol=1e-6), Tolerance(any_dtype=True)])
def test_what_is_no_number_is_the_same_as_itself(value: float, tolerance: Tolerance, tmp_path: Path) -> None:
    state = {"a": torch.tensor([value, 1.0])}
    other = {"a": state["a"].to(torch.float64 if tolerance.any_dtype else torch.float32)}
    assert compared(tmp_path, state, other, tolerance).is_same


def test_shape(tmp_path: Path) -> None:
    found = the_one(compared(tmp_path, tensors() | {"a": torch.zeros(3, 11)}, tensors()), "a")
    assert found.problem == "shape"
    assert found.ours is not None
    assert found.ours.shape == (3, 11)


def test_dtype(tmp_path: Path) -> None:
    ours, reference = tensors(), tensors()
    reference["a"] = reference["a"].bfloat16().float()
    ours["a"] = reference["a"].bfloat16()
    found = the_one(compared(tmp_path, ours, reference), "a")
    assert (found.problem, found.differing, found.max_abs) == ("dtype", 0, 0.0)
    any_dtype = Tolerance(any_dtype=True)
    assert compare(open_folder(tmp_path / "a"), open_folder(tmp_path / "b"), any_dtype).is_same
    reference["a"][3] += 1
    save(tmp_path / "c", reference)
    found = the_one(compare(open_folder(tmp_path / "a"), open_folder(tmp_path / "c"), any_dtype), "a")
    assert (found.problem, found.differing) == ("values", 1)


def test_missing_and_extra(tmp_path: Path) -> None:
    ours, reference = tensors(), tensors()
    del ours["a"], reference["b"]
    found = compared(tmp_path, ours, reference)
    assert {tensor.name: tensor.problem for tensor in found.tensors if not tensor.is_same} == {
        "a": "missing",
        "b": "extra",
    }
    ignoring = compare(open_folder(tmp_path / "a"), open_folder(tmp_path / "b"), Tolerance(), ("[ab]",))
    assert ignoring.is_same
    assert ignoring.ignored == ("a", "b")
    # The whole name.
    assert not compare(open_folder(tmp_path / "a"), open_folder(tmp_path / "b"), Tolerance(), ("", "x")).is_same


@settings(max_examples=200)
@given(
    st.floats(-10, 10, width=32),
    st.floats(-10, 10, width=32),
    st.sampled_from([0, 1e-3, 1.0]),
    st.sampled_from([0, 0.1]),
)
def test_tolerance_is_that_of_allclose(ours: float, wanted: float, atol: float, rtol: float) -> None:
    left, right = torch.tensor([ours]), torch.tensor([wanted])
    found = Differences()
    found.add(left, right, Tolerance(atol, rtol))
    if atol or rtol:
        assert (found.count == 0) == torch.allclose(left.double(), right.double(), rtol=rtol, atol=atol)
    else:
        assert (found.count == 0) == (left.view(torch.int32) == right.view(torch.int32)).item()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    state = torch.tensor([0, 1, 1, 0]).to(dtype)
    other = torch.tensor([0, 1, 0, 0]).to(dtype)
    found = the_one(compared(tmp_path, {"a": state}, {"a": other}), "a")
    assert (found.differing, found.max_abs) == (1, 1.0)


def test_integers_that_floats_cannot_tell_apart(tmp_path: Path) -> None:
    ours, reference = torch.tensor([2**60]), torch.tensor([2**60 + 1])
    assert the_one(compared(tmp_path, {"a": ours}, {"a": reference}), "a").differing == 1


# -- tied embeddings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["ours", "reference"])
def test_a_head_that_is_the_embedding_of_the_other(without: str, tmp_path: Path) -> None:
    with_head = tensors() | {"lm_head.weight": tensors()["model.embed_tokens.weight"]}
    tied = {name: tensor for name, tensor in tensors().items() if name != "lm_head.weight"}
    pair = (tied, with_head) if without == "ours" else (with_head, tied)
    found = compared(tmp_path, *pair)
    assert found.is_same
    assert "tied" in found.worst()[0].remark


@pytest.mark.parametrize("without", ["ours", "reference"])
@pytest.mark.parametrize("head", [torch.zeros(7, 5), torch.zeros(6, 5)])
def test_a_head_that_is_not(without: str, head: torch.Tensor, tmp_path: Path) -> None:
    with_head = tensors() | {"lm_head.weight": head}
    tied = {name: tensor for name, tensor in tensors().items() if name != "lm_head.weight"}
    pair = (tied, with_head) if without == "ours" else (with_head, tied)
    found = the_one(compared(tmp_path, *pair), "lm_head.weight")
    assert found.problem == ("missing" if without == "ours" else "extra")


# -- folders -----------------------------------------------------------------------------------------------


@pytest.fixture
def larger_pieces(small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole models small ones would be ten thousands."""
    monkeypatch.setattr(module, "_BATCH_BYTES", 16384)


@pytest.mark.usefixtures("larger_pieces")
def test_references_in_several_files(tmp_path: Path) -> None:
    model = make_hf_model("qwen3-tied")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="100KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    save_bins(tmp_path / "bin", load_file(tmp_path / "one/model.safetensors"), 1)
    save_bins(tmp_path / "bins", load_file(tmp_path / "one/model.safetensors"), 3)
    for left in ("one", "several", "bin", "bins"):
        for right in ("one", "bins"):
            assert compare(open_folder(tmp_path / left), open_folder(tmp_path / right)).is_same


def save_bins(folder: Path, state: Tensors, count: int) -> Path:
    """As transformers did before safetensors."""
    folder.mkdir()
    if count == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    files = {name: f"pytorch_model-{at % count + 1:05d}-of-{count:05d}.bin" for at, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({name: tensor for name, tensor in state.items() if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def test_bad_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="no weights"):
        open_folder(tmp_path / "empty")
    folder = save_bins(tmp_path / "bins", tensors(), 2)
    file = folder / "pytorch_model-00002-of-00002.bin"
    edits: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: torch.save({"b": "text"}, file), "b: wanted a tensor, found a str"),
        (lambda: torch.save({"b": torch.ones(1)}, file), "lacks lm_head.weight"),
        (lambda: torch.save([], file), "wanted a state dict"),
        (lambda: file.write_bytes(b"not a zip"), "was not written by torch.save"),
        (file.unlink, "missing"),
    )
    for edit, words in edits:
        edit()
        with pytest.raises(CheckpointCorruptError, match=words) as caught:
            open_folder(folder)
        assert str(file) in str(caught.value)


# -- the command -------------------------------------------------------------------------------------------


def test_a_result_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = tensors()
    ours["a"][0] = math.inf
    folders = [str(save(tmp_path / "a", ours)), "--reference", str(save(tmp_path / "b", tensors()))]
    assert main(["test", *folders, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["tensors"]) == (False, 4)
    (worst,) = found["worst"]
    assert (worst["name"], worst["problem"], worst["differing"], worst["max_abs"]) == ("a", "values", 1, None)
    assert worst["ours"] == {"shape": [33], "dtype": "float32"}
    assert main(["test", *folders, "--json", "--ignore", "a"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


def test_a_result_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ours = {name: tensor + number for number, (name, tensor) in enumerate(tensors().items())}
    folders = [str(save(tmp_path / "a", ours)), "--reference", str(save(tmp_path / "b", tensors()))]
    assert main(["test", *folders, "--most", "2"]) == 1
    said = capsys.readouterr().out
    assert said.index("values") < said.index("and 1 more")
    assert "float32 4x3x2" in said
    assert "not the same: 3 differ; 4 tensors" in said
    assert main(["test", *folders, "--atol", "3.5"]) == 0
    assert ": the same; 4 tensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either"),
        (["MERGED", "--local_dir", "x"], "either"),
        (["MERGED", "--atol", "-1"], "finite numbers"),
        (["MERGED", "--rtol", "nan"], "finite numbers"),
        (["MERGED", "--ignore", "("], "regular expression"),
    ],
)
def test_unusable_arguments(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(save(tmp_path / "a", tensors()))
    arguments = [folder if argument == "MERGED" else argument for argument in arguments]
    assert main(["test", *arguments, "--reference", folder]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", str(tmp_path / "a"), "--reference", str(tmp_path / "b")]) == 2
    assert str(tmp_path / "a") in capsys.readouterr().err


@pytest.mark.usefixtures("larger_pieces")
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe"])
def test_a_checkpoint_that_is_not_merged(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the flags of verl's merger."""
    hf = make_hf_folder(tmp_path / "actor" / "huggingface", name)
    actor = save_verl(tmp_path / "actor", mcore_of(hf), STAGES["pp2"], 2, tied=name.endswith("tied"))
    arguments = ["test", "--backend", "megatron", "--local_dir", str(actor), "--test_hf_dir", str(hf)]
    assert main(arguments) == 0
    assert main([*arguments, "--dtype", "bfloat16"]) == 1
    assert main([*arguments, "--dtype", "bfloat16", "--any-dtype", "--atol", "1e-2", "--rtol", "1e-2"]) == 0
    assert main([*arguments, "--is-value-model"]) == 1
    assert "is_value_model is True" in capsys.readouterr().err

    state = load_file(hf / "model.safetensors")
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    assert main([*arguments, "--backend", "fsdp"]) == 0
    state["model.norm.weight"][0] += 1
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    assert main([*arguments, "--backend", "fsdp"]) == 1


def test_two_roles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for role in ("actor", "critic"):
        save_verl(tmp_path / role, {"decoder.final_layernorm.weight": torch.ones(1)}, [[[]]])
    assert main(["test", "--local_dir", str(tmp_path), "--reference", str(tmp_path)]) == 2
    assert "--role" in capsys.readouterr().err


@pytest.mark.parametrize("ignored", [[], [".*"]])
def test_nothing_is_not_the_same(ignored: list[str], tmp_path: Path) -> None:
    state = tensors() if ignored else {}
    with pytest.raises(CheckpointMismatchError, match="nothing is left to compare"):
        compared(tmp_path, state, state, Tolerance(), ignored)


def test_names_stay_whole_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.10.self_attn.q_proj.weight"
    ours, reference = (save(tmp_path / place, {name: torch.tensor([value])}) for place, value in (("a", 1.0), ("b", 2)))
    assert main(["test", str(ours), "--reference", str(reference)]) == 1
    assert name in capsys.readouterr().out
