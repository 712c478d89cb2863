"""What a save and an export take from the model's folder, as it is."""

import json
import os
from collections import UserDict, UserList
from pathlib import Path

import pytest
import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.huggingface import side_files as taking
from mcore_ckpt.formats.huggingface.assets import check_assets, config_of, save_assets
from mcore_ckpt.formats.huggingface.side_files import copy_side_files
from mcore_ckpt.io import limits

GENERATION = b'{"eos_token_id": [5, 3], "temperature": 0.6, "top_p": 0.95}'
PUBLISHED = {
    "config.json": b"",
    "generation_config.json": GENERATION,
    "README.md": b"of the model",
    "LICENSE": b"own",
    "tokenizer.model.v3": b"\0\1",
    "vocab.bpe": b"a b",
    "merges.txt": b"a b",
    "special_tokens_map.json": b'{"eos_token": {"content": "<e>"}}',
    "encoding/deep/encode.py": b"raise SystemExit",
    "modeling_own.py": b"raise SystemExit",
    "original/params.json": b"{}",
    # What looks like weights, but is not the model's: of a speech model, and of a module of sentence-transformers.
    "spk_dict.pt": b"own",
    "mel_filters.npz": b"own",
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"own",
    "release/notes.json": b"{}",
}
NOT_TAKEN = (
    *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.safetensors.index.fp8.json"),
    *("pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx", "onnx/model.onnx_data", "a.gguf"),
    *(".git/config", ".cache/huggingface/x.metadata", ".gitattributes", "__pycache__/own.cpython-311.pyc"),
    *("adapter_config.json", "adapter_model.safetensors"),
    # A training's checkpoints below the model's folder: each would hold the files of all before it.
    *("runs/global_steps_4/actor/manifest.json", "runs/latest_checkpointed_iteration.txt"),
    *("mcore/iter_0000005/metadata.json", "mcore/latest_checkpointed_iteration.txt"),
    *("checkpoint-500/trainer_state.json", "iter_0000001/common.json", "old/release/mp_rank_00/model_optim_rng.pt"),
    *("optimizer.pt", "mtp.safetensors"),
)
TOLD = (
    *("original/consolidated.00.pth", "onnx/model.onnx", "onnx/model.onnx_data", "a.gguf", "optimizer.pt", "runs/"),
    *("adapter_config.json", "adapter_model.safetensors", "mcore/", "checkpoint-500", "iter_0000001", "old/release/"),
    *("mtp.safetensors", "Readme.md", "gone", "folder"),
)
QUANTIZATION = ("hf_quant_config.json", "quantize_config.json", "quant_model_description.json")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as it is published, with all that can lie in it."""
    from transformers import Qwen3Config

    folder = tmp_path / "published"
    for name, data in {**PUBLISHED, **dict.fromkeys((*NOT_TAKEN, *QUANTIZATION), b"{}")}.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(data)
    config = json.loads(Qwen3Config(eos_token_id=5, num_hidden_layers=2).to_json_string(use_diff=False))
    config |= {"of_somebody": {"a": 1}, "auto_map": {"AutoConfig": "modeling_own.Own"}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def loaded(source: Path) -> object:
    from transformers import Qwen3Config

    config = Qwen3Config.from_pretrained(source)
    config.name_or_path = str(source)
    return config


def test_a_copy_has_all_but_what_the_weights_make_untrue(source: Path, tmp_path: Path) -> None:
    copy_side_files(source, tmp_path, quantized=False)
    for unwanted in (*NOT_TAKEN, *QUANTIZATION):
        assert not (tmp_path / unwanted).exists(), unwanted
    assert {name: (tmp_path / name).read_bytes() for name in PUBLISHED if name != "config.json"} == {
        name: data for name, data in PUBLISHED.items() if name != "config.json"
    }
    below = source / "below" / "it"
    below.mkdir(parents=True)
    copy_side_files(source, below)
    assert files_in(below).keys() == {*PUBLISHED, *QUANTIZATION}, (
        "the copy does not hold itself, and keeps quantization files"
    )


def test_what_is_left_out_is_told(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (source / "Readme.md").write_text("another file than README.md")
    (source / "gone").symlink_to("nowhere")
    (source / "folder").symlink_to("encoding")
    found = taking.find_side_files(source, destination=tmp_path, quantized=False)
    assert {name for each in found.left_out for name in each.tensors} == {*TOLD, *QUANTIZATION}
    assert {*found.names} == {*PUBLISHED}
    copy_side_files(source, tmp_path)
    assert "gone: is left out, because it is a link to nowhere, which does not exist" in caplog.text
    assert "folder: is left out, because it is a link to a folder" in caplog.text


def test_a_save_takes_them_from_where_its_config_came(source: Path, tmp_path: Path) -> None:
    config, kept = loaded(source), dict[str, bytes]()
    config.rms_norm_eps = 0.5  # type: ignore[attr-defined]
    save_assets(tmp_path / "plain", config, None, kept)
    written = files_in(tmp_path / "plain")
    assert written.keys() == {*PUBLISHED, *QUANTIZATION}
    assert written["generation_config.json"] == GENERATION
    found = json.loads(written["config.json"])
    assert found["of_somebody"] == {"a": 1}
    assert found["rms_norm_eps"] == 0.5
    # Retention can delete the folder, if it was a checkpoint. What weights of an export contradict stays away.
    for path in sorted(source.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    source.rmdir()
    save_assets(tmp_path / "export", config, None, kept, is_export=True)
    assert files_in(tmp_path / "export").keys() == set(PUBLISHED)


def test_nothing_is_invented(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    save_assets(tmp_path, Qwen3Config(eos_token_id=5), None, {})
    assert files_in(tmp_path).keys() == {"config.json"}


def test_a_generation_config_on_the_config_wins(source: Path, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    config = loaded(source)
    config.generation_config = GenerationConfig(eos_token_id=[5, 3], temperature=0.6)  # type: ignore[attr-defined]
    assert "generation_config" not in config_of(config)
    save_assets(tmp_path, config, None, {})
    found = json.loads((tmp_path / "generation_config.json").read_bytes())
    assert found["eos_token_id"] == [5, 3]
    assert found["temperature"] == 0.6
    assert "top_p" not in found
    config.generation_config = {"eos_token_id": [5, 3]}  # type: ignore[attr-defined]
    save_assets(tmp_path, config, None, {})
    assert json.loads((tmp_path / "generation_config.json").read_bytes()) == {"eos_token_id": [5, 3]}


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        # As containers of OmegaConf, which json does not know.
        (UserDict({"eos_token_id": UserList([5, 3])}), None),
        ({"dtype": torch.bfloat16}, "cannot hold the value of dtype"),
        ({"eos_token_id": torch.tensor(5)}, "cannot hold the value of eos_token_id"),
        ("/models/qwen/generation_config.json", "set it to a GenerationConfig or a dict"),
    ],
)
def test_a_generation_config_is_written_or_refused_before_a_save(
    generation: object, named: str | None, source: Path, tmp_path: Path
) -> None:
    config = loaded(source)
    config.generation_config = generation  # type: ignore[attr-defined]
    if named is not None:
        with pytest.raises(UnsupportedError, match=named):
            check_assets(config)
        return
    check_assets(config)
    save_assets(tmp_path, config, None, {})
    assert json.loads((tmp_path / "generation_config.json").read_bytes()) == {"eos_token_id": [5, 3]}


def test_what_json_cannot_hold_is_named(source: Path) -> None:
    config = loaded(source)
    config.of_trainer = object()  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"cannot hold the value of of_trainer"):
        config_of(config)


class Tokenizer:
    """As a tokenizer of transformers: writes its own files, and knows what tokens were added to it."""

    def __init__(self, added: dict[str, int], eos: str) -> None:
        self.added, self.special_tokens_map = added, {"eos_token": eos}

    def get_added_vocab(self) -> dict[str, int]:
        return self.added

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps(self.added))


@pytest.mark.parametrize(
    ("added", "eos", "lost"),
    [
        ({"a b": 1}, "<e>", set()),
        ({"a b": 1, "<new>": 2}, "<e>", {"tokenizer.model.v3", "vocab.bpe", "merges.txt", "special_tokens_map.json"}),
        ({}, "<other>", {"special_tokens_map.json"}),
    ],
    ids=["unchanged", "new token", "another end"],
)
def test_a_changed_tokenizer_leaves_out_the_old_ones_files(
    added: dict[str, int], eos: str, lost: set[str], source: Path, tmp_path: Path
) -> None:
    save_assets(tmp_path, loaded(source), Tokenizer(added, eos), {})
    assert files_in(tmp_path).keys() - {"published"} >= {*PUBLISHED, "tokenizer.json"} - lost
    assert not any((tmp_path / name).exists() for name in lost)


def test_links_into_the_hubs_cache_are_followed_and_others_refused(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit = tmp_path / "hub" / "models--a--b" / "snapshots" / "c0"
    (tmp_path / "hub" / "models--a--b" / "blobs").mkdir(parents=True)
    commit.mkdir(parents=True)
    for number, name in enumerate(("config.json", "LICENSE")):
        blob = tmp_path / "hub" / "models--a--b" / "blobs" / str(number)
        blob.write_bytes((source / name).read_bytes())
        (commit / name).symlink_to(os.path.relpath(blob, commit))
    (commit / "loop").symlink_to(".")
    (commit / "gone").symlink_to("nowhere")
    (tmp_path / "out").mkdir()
    assert [path.name for path in copy_side_files(commit, tmp_path / "out")] == ["LICENSE", "config.json"]
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    (commit / "NOTICE").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="leads out of"):
        list(taking.side_files(commit, destination=tmp_path))
    # A save is not lost for it.
    save_assets(tmp_path / "saved", loaded(commit), None, {})
    assert files_in(tmp_path / "saved").keys() == {"config.json", "LICENSE"}
    assert "NOTICE: is left out, because it cannot be read" in caplog.text


def test_sizes_are_bounded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nbytes = (128 << 20) + 1  # one more than docs/how_to/huggingface.md promises
    with (source / "video.mp4").open("wb") as file:
        file.truncate(nbytes)
    copy_side_files(source, tmp_path)
    assert not (tmp_path / "video.mp4").exists()
    assert f"video.mp4: is left out, because it has {nbytes} bytes" in caplog.text
    monkeypatch.setattr(limits, "HF_ASSETS", 4)
    assert len(list(taking.side_files(source, destination=tmp_path))) == 4
    assert "has more than 4 files" in caplog.text


def test_a_checkpoints_own_files_beside_a_config_are_no_side_files(tmp_path: Path) -> None:
    """Megatron-Bridge and others put config.json beside the weights of a checkpoint."""
    role, out = tmp_path / "role", tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "tokenizer.json", file_names.MANIFEST_FILE, "optim/common.json", "huggingface/x.json"):
        (role / name).parent.mkdir(parents=True, exist_ok=True)
        (role / name).write_text("{}")
    copy_side_files(role, out)
    assert files_in(out).keys() == {"config.json", "tokenizer.json"}
