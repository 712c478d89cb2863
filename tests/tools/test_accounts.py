"""Every tensor of a source is in the result, or is left out for a reason that is told. What is lost is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.cli.main import main
from mcore_ckpt.models.accounting import (
    BASE,
    IGNORED,
    MAYBE_TRAINED,
    NOT_LISTED,
    LeftOut,
    account,
    matching,
    of_states,
    together,
)
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows
from tests.support.bridge_peft import add_peft_to_path
from tests.support.mcore_checkpoints import PADDING, make, mcore_tensors, pad_vocabulary, weights
from tests.support.tiny_models import VOCAB, make_hf_folder

add_peft_to_path()

TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
QKV = "decoder.layers.1.self_attention.linear_qkv"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """The exit status of a command, and what it prints: its JSON, or its error."""
    capsys.readouterr()
    status = main([*map(str, arguments), "--json"])
    printed = capsys.readouterr()
    return status, json.loads(printed.out) if status == 0 else printed.err


def reasons(report: Any) -> dict[str, list[str]]:
    return {each["reason"]: each["tensors"] for each in report["left_out"]}


def test_a_tensor_is_written_or_left_out_or_lost() -> None:
    names = ["a", "b._extra_state", "c", "d"]
    left_out = account(names, {"a"}, [matching(IGNORED, ["c", "b.*"]), of_states(), ("why", {"d"})], ValueError)
    assert left_out == (LeftOut(IGNORED, ("b._extra_state", "c")), LeftOut("why", ("d",)))
    with pytest.raises(ValueError, match=r"\['d'\]"):
        account(names, {"a", "c"}, [of_states()], ValueError)
    assert together(left_out, [LeftOut("why", ("d", "e"))])[1] == LeftOut("why", ("d", "e"))
    assert LeftOut("why", tuple("abcde")).text == "left out: a, b, c and 2 more (why)"


# -- multi-token prediction ----------------------------------------------------------------------------------


def test_published_layers_without_counterpart_are_refused_or_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron gives such a layer the attention of the last layer, which is linear here."""
    kinds = ["full_attention"] + ["linear_attention"] * 3
    hf = make_hf_folder(tmp_path / "hf", "qwen3_next", layer_types=kinds)
    tensors = load_file(hf / "model.safetensors") | {"mtp.fc.weight": torch.ones(64, 128)}
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    convert = ("convert", "--hf_model_path", hf, "--output_path", tmp_path / "steps", "--test")
    status, error = run(capsys, *convert)
    assert status == 1
    assert "has unknown tensors: mtp.fc.weight" in error
    assert not (tmp_path / "steps").exists()
    status, report = run(capsys, *convert, "--ignore", r"mtp\..*")
    assert status == 0
    assert reasons(report) == {IGNORED: ["mtp.fc.weight"]}


# -- rows of the vocabulary ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["tokenizer.json", "added_tokens.json"])
def test_added_tokens_are_no_padding(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer has 133 tokens, config.json says 131, and the checkpoint has 136 rows."""
    hf = make_hf_folder(tmp_path / "hf", "qwen3")
    tensors = mcore_tensors(hf)
    pad_vocabulary(tensors)
    role = make(tmp_path / "steps", tensors, config=(hf / "config.json").read_bytes())
    added = {"tokenizer.json": {"added_tokens": [{"id": 132}], "model": {"vocab": {"a": 5}}}}
    (role / "huggingface" / file).write_text(json.dumps(added.get(file, {"<new>": 132})))
    status, report = run(capsys, "merge", role, tmp_path / "merged")
    assert status == 0
    assert json.loads((tmp_path / "merged" / "config.json").read_bytes())["vocab_size"] == 133
    for hf_name, name in (("model.embed_tokens", "embedding.word_embeddings"), ("lm_head", "output_layer")):
        assert torch.equal(weights(tmp_path / "merged")[f"{hf_name}.weight"], tensors[f"{name}.weight"][:133])
    [(reason, names)] = reasons(report).items()
    assert reason == "padding of the vocabulary, which has 133 tokens"
    assert names == [f"{name}.weight (rows 133 to 135)" for name in ("embedding.word_embeddings", "output_layer")]


@pytest.mark.parametrize(
    ("own", "copied", "wanted"),
    [(133, None, 133), (133, 131, "has 133 tokens, .* has 131"), (133, 133, 133), (200, None, "200 tokens.* 136 rows")],
)
def test_the_tokenizer_beside_the_checkpoint_counts_too(
    own: int, copied: int | None, wanted: int | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = make_hf_folder(tmp_path / "hf", "qwen3")
    tensors = mcore_tensors(hf)
    pad_vocabulary(tensors)
    role = make(tmp_path / "steps", tensors, config=(hf / "config.json").read_bytes())
    for folder, tokens in ((role / "huggingface", own), (hf, copied)):
        if tokens is not None:
            (folder / "added_tokens.json").write_text(json.dumps({"<new>": tokens - 1}))
    status, found = run(capsys, "merge", role, tmp_path / "merged", "--hf_model_path", hf)
    if isinstance(wanted, str):
        assert status == 1
        assert re.search(wanted, found)
    else:
        assert weights(tmp_path / "merged")["lm_head.weight"].shape[0] == wanted


def test_rows_of_tokens_are_not_cut_by_reshard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = make_hf_folder(tmp_path / "hf", "qwen3")
    tensors = mcore_tensors(hf)
    pad_vocabulary(tensors)
    role = make(tmp_path / "steps", tensors, config=(hf / "config.json").read_bytes())
    (role / "huggingface" / "added_tokens.json").write_text('{"<new>": 132}')
    arguments = ("reshard", tmp_path / "steps", tmp_path / "new", "--make-vocab-size-divisible-by", "1", "--vocab-size")
    status, error = run(capsys, *arguments, 131)
    assert status == 1
    assert "has 133 tokens, but only 131 of 136 rows" in error
    assert run(capsys, *arguments, 133)[0] == 0


# -- what no model reads -------------------------------------------------------------------------------------


def test_a_file_that_the_index_does_not_list_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = make_hf_folder(tmp_path / "hf", "qwen3")
    save_file({"a": torch.ones(1)}, hf / "consolidated.safetensors")
    status, report = run(capsys, "convert", "--hf_model_path", hf, "--output_path", tmp_path / "steps")
    assert (status, reasons(report)) == (0, {NOT_LISTED: ["consolidated.safetensors"]})


@pytest.mark.parametrize("has_index", [True, False])
def test_a_file_that_the_index_of_a_base_does_not_list_is_named(
    has_index: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged model has the base's weights, so what was not read of the base is told, and is not copied."""
    hf = make_hf_folder(tmp_path / "hf", "qwen3")
    if has_index:
        names = load_file(hf / "model.safetensors")
        (hf / "model.safetensors").rename(hf / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    files = ["consolidated.safetensors", "extra.safetensors"]
    for file in files:
        save_file({"a": torch.ones(1)}, hf / file)
    config = (hf / "config.json").read_bytes()
    role = make(tmp_path / "s", adapters(), config=config, adapters=AdapterSettings(8))
    status, report = run(capsys, "merge", role, tmp_path / "merged", "--hf_model_path", hf)
    assert status == 0
    assert sorted(reasons(report)[NOT_LISTED]) == files
    assert not [file for file in files if (tmp_path / "merged" / file).exists()]


# -- what is trained beside adapters -------------------------------------------------------------------------


def adapters() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {
        f"{QKV}.adapter.linear_in.weight": torch.randn(4, 64),
        f"{QKV}.adapter.linear_out.weight": torch.randn(256, 4),
    }


def trained(tensors: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensors[name] + torch.randn(tensors[name].shape) * 0.3 for name in names}


BESIDE = {
    "head": ("qwen3", ("embedding.word_embeddings.weight", "output_layer.weight"), ["embed_tokens", "lm_head"]),
    "norms": (
        "qwen3",
        ("decoder.layers.2.input_layernorm.weight", "decoder.final_layernorm.weight"),
        ["model.layers.2.input_layernorm", "model.norm"],
    ),
    "tied": ("qwen3-tied", ("embedding.word_embeddings.weight",), None),
    "router": ("qwen3_moe", ("decoder.layers.0.mlp.router.weight",), ["model.layers.0.mlp.gate"]),
}


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        model = model.eval() if adapter is None else PeftModel.from_pretrained(model, adapter).eval()
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize(
    ("case", "alone"),
    [
        # CI takes the two forms in turn.
        pytest.param(case, alone, marks=() if number % 2 == alone else pytest.mark.full)
        for number, case in enumerate(BESIDE)
        for alone in (True, False)
    ],
)
def test_what_was_trained_beside_adapters(
    case: str, alone: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    name, names, modules = BESIDE[case]
    hf = make_hf_folder(tmp_path / "hf", name)
    base = mcore_tensors(hf)
    news = {**adapters(), **trained(base, *names)}
    saved = news if alone else {**base, **news}
    pad_vocabulary(saved)
    config = (hf / "config.json").read_bytes()
    role = make(tmp_path / "s", saved, config=config, adapters=AdapterSettings(8), stepped=news.keys())
    source = ("--hf_model_path", hf) if alone else ()
    status, report = run(capsys, "merge", role, tmp_path / "adapter", "--adapters", "only", *source)
    assert status == 0
    assert {*reasons(report).get(BASE, [])} == (set() if alone else base.keys() - set(names))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())["modules_to_save"] == modules
    status, report = run(capsys, "merge", role, tmp_path / "merged", *source)
    assert status == 0
    padding = [name for name in saved if has_vocabulary_rows(name)]
    rows = [f"{name} (rows {VOCAB} to {VOCAB + PADDING - 1})" for name in sorted(padding)]
    assert sorted(reasons(report).get(f"padding of the vocabulary, which has {VOCAB} tokens", [])) == rows
    merged = logits(tmp_path / "merged")
    assert not torch.allclose(merged, logits(hf), atol=1e-2)
    torch.testing.assert_close(logits(hf, tmp_path / "adapter"), merged, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["merge", "only"])
def test_trained_rows_that_no_padding_explains_are_refused(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = make_hf_folder(tmp_path / "hf", "qwen3")
    name = "embedding.word_embeddings.weight"
    news = {**adapters(), name: torch.ones(VOCAB + 66, 64)}
    config = (hf / "config.json").read_bytes()
    role = make(tmp_path / "s", news, config=config, adapters=AdapterSettings(8), stepped=news.keys())
    status, error = run(capsys, "merge", role, tmp_path / "new", "--adapters", how, "--hf_model_path", hf)
    assert status == 1
    assert f"tensor {name}: has shape [197, 64], but config.json requires [131, 64]" in error


def test_what_peft_has_no_place_for_is_refused_or_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = make_hf_folder(tmp_path / "hf", "qwen3_moe")
    base = mcore_tensors(hf)
    expert = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    news = {**adapters(), **trained(base, expert)}
    config = (hf / "config.json").read_bytes()
    role = make(tmp_path / "s", {**base, **news}, config=config, adapters=AdapterSettings(8), stepped=news.keys())
    only = ("merge", role, tmp_path / "adapter", "--adapters", "only")
    status, error = run(capsys, *only)
    assert status == 1
    assert f"tensor {expert}: was trained in addition to the adapters, but PEFT's form has no place for" in error
    status, report = run(capsys, *only, "--ignore", r".*\.1\.linear_fc2\.weight")
    assert status == 0
    assert reasons(report)[IGNORED] == [name for name in base if name.endswith(".1.linear_fc2.weight")]
    # Without optimizer, the manifest says what was trained; an older one does not.
    for number, (names, wanted) in enumerate((((expert,), 1), (None, 0))):
        settings = AdapterSettings(8, trained=names)
        role = make(tmp_path / f"s{number}", {**base, **news}, config=config, adapters=settings, stepped=())
        status, report = run(capsys, "merge", role, tmp_path / f"m{number}", "--adapters", "only")
        assert status == wanted
        assert "was trained in addition" in report if wanted else {*reasons(report)} == {MAYBE_TRAINED}
