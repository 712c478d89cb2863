"""FSDP shards of PEFT's models, as verl saves them: merged, or the adapters beside the model, as verl's merger does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointMismatchError, CheckpointNotFoundError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.formats.fsdp.reader import open_fsdp
from mcore_ckpt.tools.convert.merge import MergeRequest, merge
from tests.support.bridge_peft import add_peft_to_path
from tests.support.tiny_models import VOCAB, make_hf_folder, make_hf_model

ALPHA, RANK = 6, 4
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))

add_peft_to_path()
peft: Any


@pytest.fixture(autouse=True, scope="module")
def import_peft() -> None:
    """To import it takes seconds, and every worker of pytest imports this file, but one runs its tests."""
    global peft
    peft = pytest.importorskip("peft")


def adapted(name: str = "qwen3", **options: Any) -> Any:
    model = make_hf_model(name)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options
    )
    torch.manual_seed(5)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key or "magnitude" in key or "modules_to_save" in key:  # B begins with zeros
                parameter.add_(torch.rand_like(parameter) * 0.2)
    return model.eval()


def save(folder: Path, model: Any, only: str = "", meta: bool = True) -> Path:
    """As verl's FSDP manager and, with `only`, its option save_lora_only."""
    folder.mkdir()
    state = {key: tensor for key, tensor in model.state_dict().items() if only in key}
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    model.base_model.model.config.save_pretrained(folder / "huggingface")
    if meta:
        text = json.dumps({"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"})
        (folder / "lora_train_meta.json").write_text(text)
    return folder


OTHERS = {
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4, r=0),
    "loha": lambda: peft.LoHaConfig(r=4, alpha=8, target_modules=["q_proj"]),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "ia3": lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "tokens": lambda: peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[1, 2]),
    "lora and tokens": lambda: peft.LoraConfig(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1]}
    ),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_all_other_adapters_are_refused(kind: str, tmp_path: Path) -> None:
    """What was trained would be missing in the export."""
    model = peft.get_peft_model(make_hf_model("qwen3"), OTHERS[kind]())
    with pytest.raises(UnsupportedError, match="neither LoRA nor DoRA"):
        open_fsdp(save(tmp_path / "shards", model))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


def load(folder: Path, adapter: Path | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval() if adapter is None else peft.PeftModel.from_pretrained(model, adapter).eval()


SAVED = {"modules_to_save": ["lm_head", "embed_tokens"]}


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, SAVED], ids=["lora", "dora", "modules_to_save"])
def test_adapters_are_written_beside_the_model_or_merged(options: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(**options)
    source = save(tmp_path / "fsdp", model)
    report = merge(MergeRequest(source, tmp_path / "beside", backend="fsdp"))
    assert report.adapters == "beside"
    # The same files that PEFT writes, and the model without adapters.
    model.save_pretrained(tmp_path / "wanted")
    wanted = load_file(tmp_path / "wanted" / "adapter_model.safetensors")
    found = load_file(tmp_path / "beside" / "lora_adapter" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert torch.equal(logits(load(tmp_path / "beside", tmp_path / "beside" / "lora_adapter")), logits(model))
    with model.disable_adapter():
        assert torch.equal(logits(load(tmp_path / "beside")), logits(model))

    merge(MergeRequest(source, tmp_path / "merged", backend="fsdp", adapters="merge"))
    assert float((logits(load(tmp_path / "merged")) - logits(model)).abs().max()) <= 2e-5
    merge(MergeRequest(source, tmp_path / "only", backend="fsdp", adapters="only"))
    only = load_file(tmp_path / "only" / "adapter_model.safetensors")
    assert only.keys() == wanted.keys()
    base = make_hf_folder(tmp_path / "base", "qwen3")
    assert torch.equal(logits(load(base, tmp_path / "only")), logits(model))


def test_adapters_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted()
    base = make_hf_folder(tmp_path / "base", "qwen3")
    alone = save(tmp_path / "fsdp", model, only="lora_", meta=False)
    arguments = ["merge", "--backend", "fsdp", "--local_dir", str(alone), "--target_dir"]
    # Neither alpha nor the base are in the checkpoint.
    assert main([*arguments, str(tmp_path / "a"), "--adapters", "only"]) == 1
    assert "--lora-alpha" in capsys.readouterr().err
    alpha = ["--lora-alpha", str(ALPHA)]
    assert main([*arguments, str(tmp_path / "a"), *alpha]) == 1
    assert "has only adapters: name the folder of the base model" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()

    assert main([*arguments, str(tmp_path / "adapter"), *alpha, "--adapters", "only"]) == 0
    assert torch.equal(logits(load(base, tmp_path / "adapter")), logits(model))
    assert main([*arguments, str(tmp_path / "merged"), *alpha, "--hf_model_path", str(base)]) == 0
    whole = save(tmp_path / "whole", model)
    merge(MergeRequest(whole, tmp_path / "wanted", backend="fsdp", adapters="merge"))
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("wanted", "merged"))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    model = adapted()
    plain, alone, half = (save(tmp_path / only, model, only=only) for only in ("base_layer", "lora_", "lora_B"))
    with pytest.raises(CheckpointMismatchError, match="has no adapters, but --adapters is merge"):
        merge(MergeRequest(plain, tmp_path / "a", backend="fsdp", adapters="merge"))
    with pytest.raises(InvalidArgumentError, match="no weights, so --adapters cannot be beside"):
        merge(MergeRequest(alone, tmp_path / "a", backend="fsdp", adapters="beside"))
    with pytest.raises(CheckpointNotFoundError, match="--hf_model_path"):
        merge(MergeRequest(alone, tmp_path / "a", backend="fsdp"))
    with pytest.raises(CheckpointMismatchError, match="has no lora_A"):
        merge(MergeRequest(half, tmp_path / "a", backend="fsdp", adapters="only"))
    model.add_adapter("second", model.peft_config["default"])
    two = save(tmp_path / "two", model)
    with pytest.raises(UnsupportedError, match=r"has several sets of adapters \(default, second\)"):
        merge(MergeRequest(two, tmp_path / "a", backend="fsdp"))
    assert not (tmp_path / "a").exists()
