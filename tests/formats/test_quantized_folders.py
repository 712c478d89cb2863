"""Folders with quantized weights: what is read of them is what transformers dequantizes, bit for bit."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import RegionRead
from mcore_ckpt.formats.huggingface.reader import FolderContents, HuggingFaceReader, read_contents
from mcore_ckpt.formats.huggingface.safetensors_files import read_file
from mcore_ckpt.formats.huggingface.stored_weights import StoredWeights
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.io import tuning
from mcore_ckpt.models.accounting import SCALES
from mcore_ckpt.models.quantization import quantization_of, without_quantization
from mcore_ckpt.sharding.cuts import Cut
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey
from mcore_ckpt.sharding.regions import Region
from tests.support import quantized_folders as published
from tests.support.quantized_folders import Parts, dequantize_with_transformers, needs_accelerate, publish
from tests.support.tiny_models import make_hf_folder

SMALL_FP8 = {**published.FP8_CONFIG, "weight_block_size": [8, 8]}
SMALL_INT4 = published.compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)
Form = tuple[str, Callable[[str, torch.Tensor], Parts], dict[str, Any], Callable[[str, torch.Tensor], bool]]


def is_stacked(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 3 and name.endswith("_proj")


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return published.is_linear(name, tensor)


# transformers wants blocks that fill the tensors. Publishers' blocks of 128 do not: see EDGES.
FORMS: dict[str, Form] = {
    "fp8": ("deepseek_v3", functools.partial(published.fp8, block=(8, 8)), SMALL_FP8, is_linear),
    "fp8-powers-of-2": (
        "qwen3_moe",
        functools.partial(published.fp8, block=(8, 8), scales="float8_e8m0fnu"),
        {**SMALL_FP8, "scale_fmt": "ue8m0"},
        is_linear,
    ),
    "mxfp4": ("gpt_oss", published.mxfp4, published.MXFP4_CONFIG, is_stacked),
    "int4": ("qwen3_moe", functools.partial(published.int4, group=8), SMALL_INT4, is_linear),
    "int8": ("qwen3", published.int8, published.INT8_CONFIG, is_linear),
}
EDGES: dict[str, Form] = {
    "fp8-128": ("deepseek_v3", functools.partial(published.fp8, block=(128, 128)), published.FP8_CONFIG, is_linear),
    "fp8-edges": (
        "qwen3",
        functools.partial(published.fp8, block=(24, 40)),
        {**published.FP8_CONFIG, "weight_block_size": [24, 40]},
        is_linear,
    ),
}


def make(path: Path, form: Form) -> Path:
    name, quantize, config, chosen = form
    return publish(make_hf_folder(path, name, dtype="bfloat16"), quantize, config, chosen)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantized")
    return {name: make(root / name, form) for name, form in {**FORMS, **EDGES}.items()}


def whole(reader: HuggingFaceReader, name: str) -> torch.Tensor:
    info = reader.info(ShardKey(name, MODEL))
    assert info is not None
    return part(reader, name, Region.whole(info.shape)).view(info.shape)


def part(reader: HuggingFaceReader, name: str, region: Region) -> torch.Tensor:
    info = reader.info(ShardKey(name, MODEL))
    assert info is not None
    memory = torch.full((region.numel,), torch.nan, dtype=info.dtype)
    read_regions(reader, [RegionRead(name, region, memory)])
    return memory


def assert_same(ours: HuggingFaceReader, theirs: HuggingFaceReader) -> None:
    assert ours.names == theirs.names
    for name in ours.names:
        assert torch.equal(whole(ours, name), whole(theirs, name)), name


@needs_accelerate
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_values_are_those_of_transformers(dtype: str, tmp_path: Path) -> None:
    made = [make(tmp_path / name, form) for name, form in FORMS.items()]
    dequantize_with_transformers(dtype, *made)
    for folder in made:
        ours = HuggingFaceReader(read_contents(folder), dtype=getattr(torch, dtype))
        assert_same(ours, HuggingFaceReader(read_contents(folder / "plain")))


@pytest.mark.parametrize("form", EDGES)
def test_blocks_at_the_edges_are_smaller(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Held against the formula, element by element: transformers refuses such tensors."""
    folder = folders[form]
    stored = load_file(folder / "model.safetensors")
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values())
    values = published.fp8_values(stored, EDGES[form][2]["weight_block_size"])
    plain = {
        name: tensor.to(torch.bfloat16) if f"{name}_scale_inv" in stored else tensor for name, tensor in values.items()
    }
    copy(folder, tmp_path / "plain", plain)
    assert_same(HuggingFaceReader(read_contents(folder)), HuggingFaceReader(read_contents(tmp_path / "plain")))


def test_experts_of_kimi_k2_5_are_integers_and_its_text_config_says_so(tmp_path: Path) -> None:
    def is_expert(name: str, tensor: torch.Tensor) -> bool:
        return ".mlp.experts." in name

    folder = make(tmp_path / "kimi", ("kimi_k25", functools.partial(published.int4, group=8), SMALL_INT4, is_expert))
    outside = read_contents(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    ours = HuggingFaceReader(read_contents(folder))
    assert_same(ours, HuggingFaceReader(outside))
    plain = HuggingFaceReader(read_contents(make_hf_folder(tmp_path / "plain", "kimi_k25", dtype="bfloat16")))
    for name in ours.names:
        found, wanted = whole(ours, name), whole(plain, name)
        assert torch.allclose(found, wanted, atol=0.06) if ".experts." in name else torch.equal(found, wanted), name


def copy(folder: Path, target: Path, tensors: Parts, **config: Any) -> Path:
    """A folder with these tensors, and the config of another one without its quantization, changed."""
    target.mkdir()
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("quantization_config")
    (target / "config.json").write_text(json.dumps({**fields, **config}))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_a_tensor_is_a_part_of_the_whole(
    data: st.DataObject, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when only a few rows of codes are read at a time."""
    reader = HuggingFaceReader(read_contents(folders[data.draw(st.sampled_from(sorted(folders)))]))
    name = data.draw(st.sampled_from(list(reader.names)))
    complete = whole(reader, name)
    axis = data.draw(st.sampled_from(range(complete.ndim)))
    length = complete.shape[axis]
    sections = data.draw(st.sampled_from([(1,), (1, 1)])) if axis == 0 and length % 2 == 0 else (1,)
    sizes = [size for size in range(1, 9) if length // len(sections) % size == 0]
    size = data.draw(st.sampled_from(sizes))
    number = data.draw(st.integers(0, size - 1))
    region = Cut(axis, sections).region(tuple(complete.shape), number, size)
    first = data.draw(st.integers(0, region.numel - 1))
    last = data.draw(st.integers(first + 1, region.numel))
    monkeypatch.setattr(tuning, "CONVERT_BYTES", data.draw(st.sampled_from([1, 100, 1 << 20])))
    of_region = torch.cat([half.chunk(size, axis)[number] for half in complete.chunk(len(sections), axis)], axis)
    assert torch.equal(part(reader, name, region.with_flat(first, last)), of_region.reshape(-1)[first:last])


def test_other_ranks_plan_with_the_headers_that_rank_0_sends(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        contents = read_contents(folder)
        sent = FolderContents.from_record(folder, json.loads(json.dumps(contents.to_record())))
        assert sent.tensors == contents.tensors


def test_values_have_the_dtype_of_the_model_unless_another_is_wanted(folders: dict[str, Path]) -> None:
    contents = read_contents(folders["fp8"])
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    for wanted, found in ((None, torch.bfloat16), (torch.float32, torch.float32), (torch.float16, torch.float16)):
        reader = HuggingFaceReader(contents, dtype=wanted)
        assert whole(reader, name).dtype == found
        assert torch.equal(
            whole(reader, name).float(), whole(HuggingFaceReader(contents, dtype=torch.float32), name).to(found).float()
        )


def change(folder: Path, target: Path, names: dict[str, torch.Tensor | None], **fields: Any) -> Path:
    """A copy of a folder with other tensors (None: without) and other fields of `quantization_config`."""
    tensors = {**load_file(folder / "model.safetensors"), **names}
    copy(folder, target, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (target / "config.json").write_text(json.dumps(config))
    return target


O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("form", "names", "fields", "message"),
    [
        ("fp8", {}, {"quant_method": "awq"}, "quantization_config is 'awq'"),
        ("fp8", {f"{O_PROJ}_scale_inv": None}, {}, "o_proj.weight: .* no scales"),
        ("fp8", {f"{O_PROJ}_scale_inv": torch.ones(3, 5)}, {}, "o_proj.weight: has shape .* does not fit the blocks"),
        ("fp8", {f"{O_PROJ}_scale_inv": torch.ones(0, 5)}, {}, "does not fit the blocks"),
        ("int4", {f"{O_PROJ}_zero_point": torch.ones(3, 5)}, {}, "o_proj.weight_zero_point: belongs to a form"),
        ("int4", {}, {"config_groups": {"a": {"weights": {"symmetric": False}}}}, "zero point"),
        (
            "int4",
            {},
            {"config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}}},
            "'3'.* bits, but only integers",
        ),
        ("mxfp4", {"model.layers.0.mlp.experts.down_proj_scales": torch.ones(4, 7, 2)}, {}, "does not fit the blocks"),
    ],
)
def test_what_cannot_be_dequantized_is_refused_by_name(
    form: str,
    names: dict[str, torch.Tensor | None],
    fields: dict[str, Any],
    message: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    changed = change(folders[form], tmp_path / "changed", names, **fields)
    with pytest.raises((UnsupportedError, CheckpointMismatchError), match=message):
        HuggingFaceReader(read_contents(changed))


@pytest.mark.parametrize("form", FORMS)
def test_what_describes_codes_is_told_as_left_out(form: str, folders: dict[str, Path]) -> None:
    contents = read_contents(folders[form])
    endings = ("_scale", "_scale_inv", "_scales", "_shape")
    described = {name for name in contents.tensors if name.endswith(endings)}
    found = {each.reason: set(each.tensors) for each in HuggingFaceReader(contents).left_out}
    assert found[SCALES] == described


def test_scales_of_activations_and_of_the_cache_are_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    of_activations = {f"{O_PROJ.removesuffix('.weight')}.{name}": torch.ones(1) for name in ("input_scale", "k_scale")}
    changed = change(folders["fp8"], tmp_path / "changed", of_activations)
    assert_same(HuggingFaceReader(read_contents(changed)), HuggingFaceReader(read_contents(folders["fp8"])))


def test_without_a_size_of_blocks_they_have_that_of_transformers(tmp_path: Path) -> None:
    """Not that of equal parts: 192 rows with two scales are a block of 128 rows and one of 64."""
    tensors = {O_PROJ: torch.randn(192, 64)}
    quantized = published.fp8(O_PROJ, tensors[O_PROJ], (128, 128))
    save_file(quantized, tmp_path / "model.safetensors")
    stored = {tensor.name: tensor for tensor in read_file(tmp_path / "model.safetensors")}
    for fields in ({}, {"weight_block_size": [128, 128]}):
        config = {"quantization_config": {"quant_method": "fp8", **fields}}
        weights = StoredWeights(tmp_path, config, stored, torch.float32)
        found = torch.full((192 * 64,), torch.nan)
        weights.read([(ReadRange.whole(weights.whole(O_PROJ)), found)])
        assert torch.equal(found.view(192, 64), published.fp8_values(quantized, (128, 128))[O_PROJ])
    for block in ([64, 64], [128, 32]):
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
        with pytest.raises(CheckpointMismatchError, match="does not fit the blocks"):
            StoredWeights(tmp_path, config, stored)


@pytest.mark.parametrize("size", [2**62, 2**64 - 1])
def test_a_block_larger_than_the_tensor_is_the_tensor(size: int, tmp_path: Path) -> None:
    quantized = published.fp8(O_PROJ, torch.randn(40, 24), (40, 24))
    save_file(quantized, tmp_path / "model.safetensors")
    stored = {tensor.name: tensor for tensor in read_file(tmp_path / "model.safetensors")}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [size, size]}}
    weights, found = StoredWeights(tmp_path, config, stored, torch.float32), torch.full((40 * 24,), torch.nan)
    weights.read([(ReadRange.whole(weights.whole(O_PROJ)), found)])
    assert torch.equal(found.view(40, 24), published.fp8_values(quantized, (40, 24))[O_PROJ])


@pytest.mark.parametrize(
    "config",
    [
        "fp8",
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": "b"}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": [4], "type": "int"}}}},
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
    ],
)
def test_configs_that_nobody_writes_are_refused(config: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(folders["int4"], tmp_path / "copy", load_file(folders["int4"] / "model.safetensors"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    with pytest.raises(UnsupportedError, match="quantization_config"):
        HuggingFaceReader(read_contents(folder))


def test_files_with_scales_must_be_there_too(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["fp8"] / "model.safetensors")
    scales = {name for name in tensors if name.endswith("_scale_inv")}
    folder = copy(folders["fp8"], tmp_path / "copy", {})
    (folder / "config.json").write_bytes((folders["fp8"] / "config.json").read_bytes())
    (folder / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + (name in scales)}-of-00002.safetensors" for name in tensors}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    reader = HuggingFaceReader(read_contents(folder))
    assert_same(reader, HuggingFaceReader(read_contents(folders["fp8"])))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointCorruptError, match=r"model-00002-of-00002.safetensors: cannot be opened on this rank"
    ):
        reader.check_visible(["model-00001-of-00002.safetensors"])


def test_a_plain_config_says_nowhere_how_weights_are_quantized() -> None:
    stated = {"quant_method": "compressed-tensors"}
    for field in ("quantization_config", "compression_config"):
        deep = {"a": 1, "thinker_config": {"text_config": {"b": 2, field: stated}, field: stated}, field: stated}
        assert without_quantization(deep) == {"a": 1, "thinker_config": {"text_config": {"b": 2}}}
        found = quantization_of({"text_config": {field: stated}})
        assert found is not None
        assert found.method == "compressed-tensors"
