"""`merge --quantize fp8-block`: an export that can take the place of the folder that was published."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import RegionRead, TensorInfo
from mcore_ckpt.formats.huggingface.export_plan import plan_tensors
from mcore_ckpt.formats.huggingface.fp8_blocks import Fp8Blocks
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader, read_contents
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.io import tuning
from mcore_ckpt.models.mapping import HfTensor, Slab
from mcore_ckpt.ranks.meeting import rendezvous
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.tools.convert.merge import MergeRequest, merge
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.convert.to_native import convert_to_native
from mcore_ckpt.tools.examine.compare import compare, open_folder
from tests.support import quantized_folders as published
from tests.support.quantized_folders import dequantize_with_transformers, is_linear, needs_accelerate
from tests.support.tiny_models import make_hf_folder

POWERS_OF_2 = {"scale_fmt": "ue8m0"}


def publish(path: Path, name: str, block: int, scales: str = "float32", **fields: Any) -> Path:
    config = {**published.FP8_CONFIG, "weight_block_size": [block, block], **fields}
    quantize = functools.partial(published.fp8, block=(block, block), scales=scales)
    return published.publish(make_hf_folder(path, name, dtype="bfloat16"), quantize, config, is_linear)


def there_and_back(folder: Path, root: Path, **options: Any) -> Path:
    report = convert_to_native(folder, root / "steps", WantedLayout(tp=2), rendezvous("fp8-blocks", 60.0))
    merge(MergeRequest(report.path, root / "merged", fp8_blocks=True, **options))
    return root / "merged"


@pytest.mark.parametrize(
    ("name", "block"), [("deepseek_v3", 128), pytest.param("qwen3_moe", 24, marks=pytest.mark.full)]
)
def test_codes_come_back_bit_for_bit(name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files that are cut within blocks, and with a few rows of blocks read at a time.

    A scale comes back from its product with the largest code, which was rounded to bfloat16.
    """
    folder = publish(tmp_path / "published", name, block)
    monkeypatch.setattr(tuning, "STREAM_BYTES", 1 << 13)
    monkeypatch.setattr(tuning, "SCATTER_BYTES", 1 << 12)
    merged = there_and_back(folder, tmp_path, max_shard_bytes=100_000)
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    ours = {}
    for file in set(index["weight_map"].values()):
        ours |= load_file(merged / file)
    theirs = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        found = ours[key]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), key
        if key.endswith("_scale_inv"):
            assert torch.allclose(found, tensor, rtol=2**-8, atol=0), key
        else:
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), key


def test_values_come_back_if_scales_are_powers_of_two(tmp_path: Path) -> None:
    """Not always the codes: half the scale and twice the codes are the same values."""
    folder = publish(tmp_path / "published", "qwen3_moe", 16, "float8_e8m0fnu", **POWERS_OF_2)
    merged = there_and_back(folder, tmp_path)
    assert_same_values(merged, folder)
    stored = load_file(merged / "model.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if "scale" in name} == {torch.float8_e8m0fnu}


def test_the_config_says_what_is_quantized(tmp_path: Path) -> None:
    fields = {"modules_to_not_convert": ["model.layers.1.mlp.experts", "model.layers.0.self_attn.q_proj"]}
    merged = there_and_back(publish(tmp_path / "published", "qwen3_moe", 16, **fields), tmp_path)
    found = json.loads((merged / "config.json").read_text())["quantization_config"]
    assert {**found, **fields} == {**published.FP8_CONFIG, "weight_block_size": [16, 16], **fields}
    kept = found["modules_to_not_convert"]
    assert kept[:2] == fields["modules_to_not_convert"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.3.mlp.gate"} <= {*kept}
    for name, tensor in load_file(merged / "model.safetensors").items():
        is_kept = any(name.startswith(module) for module in kept)
        assert (tensor.dtype == torch.float8_e4m3fn) == (is_linear(name, tensor) and not is_kept), name


def test_a_model_that_was_plain_gets_the_default_form(tmp_path: Path) -> None:
    merged = there_and_back(make_hf_folder(tmp_path / "plain", "qwen3"), tmp_path, dtype=torch.bfloat16)
    config = json.loads((merged / "config.json").read_text())
    assert config["quantization_config"] == {**published.FP8_CONFIG, "modules_to_not_convert": ["lm_head"]}
    assert config["dtype"] == "bfloat16"


@needs_accelerate
@pytest.mark.full
def test_transformers_loads_it(tmp_path: Path) -> None:
    """With blocks that fill the tensors: without a GPU, it takes the shape of the scales for that of the blocks."""
    names = ("deepseek_v3", "qwen3_moe")
    merged = [there_and_back(publish(tmp_path / name / "hf", name, 8), tmp_path / name) for name in names]
    dequantize_with_transformers("bfloat16", *merged)
    for folder in merged:
        assert_same_values(folder, folder / "plain")


def assert_same_values(folder: Path, other: Path) -> None:
    ours, theirs = (HuggingFaceReader(read_contents(each)) for each in (folder, other))
    assert ours.names == theirs.names
    for name in ours.names:
        assert torch.equal(whole(ours, name), whole(theirs, name)), name


def whole(reader: HuggingFaceReader, name: str) -> torch.Tensor:
    info = reader.info(ShardKey(name, MODEL))
    assert info is not None
    memory = torch.full((Region.whole(info.shape).numel,), torch.nan, dtype=info.dtype)
    read_regions(reader, [RegionRead(name, Region.whole(info.shape), memory)])
    return memory


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    block=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    powers_of_two=st.booleans(),
    exponent=st.integers(-120, 100),
    seed=st.integers(0, 2**31),
)
def test_no_value_moves_by_more_than_half_a_step(
    rows: int, columns: int, block: tuple[int, int], powers_of_two: bool, exponent: int, seed: int
) -> None:
    """float8_e4m3fn has 3 digits behind the point, and steps of 2**-9 below 2**-6."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    values[values.abs() < values.abs().max() / 4] = 0
    codes, scales = Fp8Blocks(block, powers_of_two).quantize(values, "w")
    assert codes.shape == values.shape
    assert scales.shape == (-(-rows // block[0]), -(-columns // block[1]))
    each = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns].double()
    difference = (codes.double() * each - values.double()).abs()
    assert (difference <= torch.maximum(values.double().abs() * 2**-4, each * 2**-10) * (1 + 1e-6)).all()
    assert (codes.float()[values == 0] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_without_a_scale_are_refused(value: float) -> None:
    values = torch.randn(5, 5)
    values[4, 4] = value
    with pytest.raises(CheckpointMismatchError, match="tensor w: has a value that is NaN or infinite"):
        Fp8Blocks((2, 2)).quantize(values, "w")


def test_a_model_without_a_weight_to_quantize_is_refused() -> None:
    """Its config would say that it is quantized."""
    tensor = HfTensor("blocks.0.attn.qkv.weight", (4, 4), (Slab(0, "a", Region.whole((4, 4))),))
    with pytest.raises(UnsupportedError, match=r"no weight that block FP8 quantizes .* without --quantize"):
        plan_tensors([tensor], {"a": TensorInfo(torch.bfloat16, (4, 4))}, blocks=Fp8Blocks())


def test_a_quantized_folder_can_be_the_reference(tmp_path: Path) -> None:
    """Values are compared, and not codes: an export that was not quantized again is the same model."""
    folder = publish(tmp_path / "published", "qwen3_moe", 16)
    report = convert_to_native(folder, tmp_path / "steps", WantedLayout(), rendezvous("fp8-blocks", 60.0), test=True)
    merge(MergeRequest(report.path, tmp_path / "merged"))
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert compare(open_folder(tmp_path / "merged"), open_folder(folder)).is_same
    other = publish(tmp_path / "other", "qwen3_moe", 24)
    assert not compare(open_folder(tmp_path / "merged"), open_folder(other)).is_same
