"""A HuggingFace folder, read as parts of megatron's tensors."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.huggingface.reader import FolderContents, HuggingFaceReader, read_contents
from mcore_ckpt.formats.huggingface.safetensors_files import read_folder
from mcore_ckpt.formats.locate import Locator, Wanted
from mcore_ckpt.models.mapping import hf_tensors
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.sharding.cuts import Cut
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey
from mcore_ckpt.sharding.regions import Region
from tests.support.tiny_models import AS_TRANSFORMERS_WRITES_KIMI, make_config, make_hf_folder

GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def random_folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {t.name: torch.randn(t.shape, generator=generator) for t in hf_tensors(model_from_config(config))}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def change(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name.replace("__", "."): t for name, t in tensors.items()}}, file)


def read(reader: HuggingFaceReader, name: str, region: Region) -> torch.Tensor:
    located = Locator(reader, None).find(Wanted(ShardKey(name, MODEL), region, "here"))
    assert located is not None
    memory = torch.full((region.numel,), torch.nan, dtype=located.dtype)
    if located.outside:
        memory.zero_()
    reader.read((part, memory) for part in located.reads)
    return memory


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    made = {name: make_hf_folder(root / name, name) for name in ("qwen3", "qwen3_moe", "deepseek_v3")}
    return {**made, "gpt_oss": random_folder(root / "gpt_oss", GPT_OSS)}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_any_tensor_is_a_part_of_the_whole(data: st.DataObject, folders: dict[str, Path]) -> None:
    reader = HuggingFaceReader(read_contents(folders[data.draw(st.sampled_from(sorted(folders)))]))
    name = data.draw(st.sampled_from(list(reader.names)))
    shape = reader.parts_of(name)[0].region.global_shape
    whole = read(reader, name, Region.whole(shape)).view(shape)
    assert not whole.isnan().any()
    axis = data.draw(st.sampled_from(range(len(shape))))
    sections = 2 if axis == 0 and shape[0] % 4 == 0 else 1
    size = data.draw(st.sampled_from([n for n in (1, 2, 4) if shape[axis] % (n * sections) == 0]))
    rank = data.draw(st.integers(0, size - 1))
    region = Cut(axis, (1,) * sections).region(shape, rank, size)
    part = torch.cat([section.chunk(size, axis)[rank] for section in whole.chunk(sections, axis)], axis).reshape(-1)
    start = data.draw(st.integers(0, part.numel()))
    stop = data.draw(st.integers(start, part.numel()))
    assert torch.equal(read(reader, name, region.with_flat(start, stop)), part[start:stop])


def test_values_that_change_are_changed_back(folders: dict[str, Path]) -> None:
    reader = HuggingFaceReader(read_contents(folders["gpt_oss"]))
    stored = load_file(folders["gpt_oss"] / "model.safetensors")
    both = stored["model.layers.1.mlp.experts.gate_up_proj"][2]
    name = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    found = read(reader, name, Region.whole((48, 32))).view(48, 32)
    assert torch.equal(found, torch.cat([both[:, 0::2].T, both[:, 1::2].T]))


def test_a_vocabulary_is_padded_with_zeros(folders: dict[str, Path]) -> None:
    reader = HuggingFaceReader(read_contents(folders["qwen3"]))
    found = read(reader, "output_layer.weight", Region.whole((136, 64))).view(136, 64)
    assert torch.equal(found[:131], load_file(folders["qwen3"] / "model.safetensors")["lm_head.weight"])
    assert not found[131:].any()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_what_travels_is_what_was_read(name: str, folders: dict[str, Path]) -> None:
    contents = read_contents(folders[name])
    record = json.loads(json.dumps(contents.to_record()))
    assert FolderContents.from_record(folders[name], record) == contents


def test_what_is_not_a_number_is_named(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    broken = load_file(folder / "model.safetensors")["model.norm.weight"]
    broken[3] = torch.nan
    change(folder, model__norm__weight=broken)
    reader = HuggingFaceReader(read_contents(folder))
    (part,) = reader.parts_of("decoder.final_layernorm.weight")
    with pytest.raises(CheckpointCorruptError, match=r"final_layernorm.*NaN"):
        reader.read_numbers([(ReadRange.whole(part), torch.empty(64))])


def test_what_megatron_does_not_have_must_be_zero(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3-value")
    HuggingFaceReader(read_contents(folder)).check_left_out()
    change(folder, score__bias=torch.ones(1))
    with pytest.raises(CheckpointMismatchError, match="should be zero"):
        HuggingFaceReader(read_contents(folder)).check_left_out()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_of_an_unknown_form_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    change(folder, model__norm__weight=torch.ones(64).to(dtype))
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight: is stored as .*quantization_config"):
        HuggingFaceReader(read_contents(folder))


def test_files_that_this_process_does_not_see_are_named(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    reader = HuggingFaceReader(read_contents(folder))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"1")
    with pytest.raises(CheckpointCorruptError, match="bytes here"):
        reader.check_visible(["model.safetensors"])
    file.unlink()
    with pytest.raises(CheckpointCorruptError, match="rank0"):
        reader.check_visible(["model.safetensors"])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]},
        {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
    ],
)
def test_headers_of_other_than_whole_numbers(entry: dict[str, Any], tmp_path: Path) -> None:
    header = json.dumps({"a": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(CheckpointCorruptError, match="Expected `int`, got `"):
        read_folder(tmp_path)


def test_a_tied_head_that_is_there_all_the_same_is_the_embedding(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3-tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, lm_head__weight=embedding)
    reader = HuggingFaceReader(read_contents(folder))
    reader.check_left_out()
    assert "output_layer.weight" not in reader.names
    change(folder, lm_head__weight=embedding * 2)
    with pytest.raises(CheckpointMismatchError, match=r"lm_head\.weight.*differ.*tie_word_embeddings"):
        HuggingFaceReader(read_contents(folder)).check_left_out()
    HuggingFaceReader(read_contents(folder), [r"lm_head\.weight"]).check_left_out()


def test_copies_in_multi_token_prediction_are_copies(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "deepseek_v3-mtp")
    HuggingFaceReader(read_contents(folder)).check_left_out()
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    change(folder, model__layers__4__shared_head__head__weight=head + 1)
    with pytest.raises(CheckpointMismatchError, match=r"layers\.4\.shared_head\.head\.weight.*lm_head\.weight.*differ"):
        HuggingFaceReader(read_contents(folder)).check_left_out()


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "gone.safetensors"}}')
    assert list(read_folder(tmp_path)) == ["a"]


# -- vision-language models, in the forms in which folders have them


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of megatron's that a folder holds."""
    reader = HuggingFaceReader(read_contents(folder))
    whole = {name: reader.info(ShardKey(name, MODEL)) for name in reader.names}
    return {name: read(reader, name, Region.whole(info.shape)) for name, info in whole.items() if info is not None}


def assert_reads_as(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = all_tensors(folder)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_both_spellings_of_qwen2_5_vl_are_read(tmp_path: Path) -> None:
    """transformers has the modules `model.visual` and `model.language_model`, and writes the first release's names."""
    folder = make_hf_folder(tmp_path / "hf", "qwen2_5_vl")
    wanted, file = all_tensors(folder), folder / "model.safetensors"
    assert "visual.blocks.0.attn.qkv.weight" in load_file(file)
    spelled = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(file).items()
    }
    assert "model.language_model.layers.0.mlp.up_proj.weight" in spelled
    save_file(spelled, file, {"format": "pt"})
    assert_reads_as(folder, wanted)


def test_kimi_k2_5_is_read_under_the_names_and_the_config_of_both_its_programs(tmp_path: Path) -> None:
    """As published, with Python files of its own, and as transformers 5.23 writes it."""
    folder = make_hf_folder(tmp_path / "hf", "kimi_k25")
    wanted, file, path = all_tensors(folder), folder / "model.safetensors", folder / "config.json"
    config = json.loads(path.read_text())
    published = copy.deepcopy(config)
    published["architectures"] = ["KimiK25ForConditionalGeneration"]
    published["text_config"]["model_type"] = "kimi_k2"
    vision = {key: config["vision_config"][key] for key in ("patch_size", "merge_kernel_size")}
    renamed = {"hidden_size": "vt_hidden_size", "intermediate_size": "vt_intermediate_size"}
    renamed |= {"num_hidden_layers": "vt_num_hidden_layers"}
    renamed |= {f"pos_emb_{side}": f"init_pos_emb_{side}" for side in ("height", "width")}
    published["vision_config"] = vision | {new: config["vision_config"][old] for old, new in renamed.items()}
    path.write_text(json.dumps(published))
    assert_reads_as(folder, wanted)
    assert to_mcore_config(model_from_config(published)) == to_mcore_config(model_from_config(config))

    tensors = load_file(file)
    for old, new in AS_TRANSFORMERS_WRITES_KIMI.items():
        for name in [name for name in tensors if name.startswith(new)]:
            tensors[old + name.removeprefix(new)] = tensors.pop(name)
    assert "language_model.model.blocks.0.mlp.up_proj.weight" in tensors
    save_file(tensors, file, {"format": "pt"})
    assert_reads_as(folder, wanted)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vision_config": None}, "vision_config is None"),
        ({"merge_kernel_size": 2}, "merge_kernel_size is 2, but must be two numbers"),
        ({"merge_kernel_size": [2, 0]}, "merge_kernel_size is 0"),
        ({"hidden_size": None}, "vt_hidden_size is None"),
    ],
)
def test_a_tower_of_kimi_k2_5_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    config = make_config("kimi_k25")
    if "vision_config" in fields:
        config |= fields
    else:
        config["vision_config"] = {**config["vision_config"], **fields}
    with pytest.raises(UnsupportedError, match=re.escape(words)):
        model_from_config(config)


def test_a_config_as_qwen2_5_vl_was_published_is_read(tmp_path: Path) -> None:
    """It has the fields of the language model beside `vision_config`, and calls its rotary embeddings "mrope"."""
    folder = make_hf_folder(tmp_path / "hf", "qwen2_5_vl-tied")
    wanted, path = all_tensors(folder), folder / "config.json"
    config = json.loads(path.read_text())
    model = model_from_config(config)
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    published = {**text, **config, "torch_dtype": config.pop("dtype"), "model_type": "qwen2_5_vl"}
    path.write_text(json.dumps(published))
    assert_reads_as(folder, wanted)
    assert to_mcore_config(model_from_config(published)) == to_mcore_config(model)


def test_experts_of_qwen3_vl_are_read_as_published_and_as_transformers_5_makes_them(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3_vl_moe")
    wanted, file = all_tensors(folder), folder / "model.safetensors"
    tensors = load_file(file)
    experts = [name for name in tensors if ".mlp.experts." in name]
    assert tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 64, 80)
    turned = {name: tensors[name].transpose(1, 2).contiguous() for name in experts}
    save_file({**tensors, **turned}, file, {"format": "pt"})
    assert_reads_as(folder, wanted)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vision_config": None}, "vision_config is None"),
        ({"num_heads": 5}, "5 num_heads cannot share a hidden_size of 32"),
        ({"text_config": None}, "hidden_size is None"),
        ({"depth": 10**6}, "1000000 v_layers, more than 100000"),
    ],
)
def test_configs_of_no_vision_language_model_are_refused(fields: dict[str, Any], words: str) -> None:
    config = make_config("qwen3_vl")
    if fields.keys() <= config["vision_config"].keys():
        fields = {"vision_config": {**config["vision_config"], **fields}}
    with pytest.raises(UnsupportedError, match=words):
        model_from_config({**config, **fields})
