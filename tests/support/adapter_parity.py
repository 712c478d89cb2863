"""Logits of models with Megatron-Bridge's adapters, and of PEFT's and transformers' models that they become.

Started by test_adapter_parity.py in a process of its own, for the reason that parity.py has.

    python adapter_parity.py <folder> <case> ...     writes {case: {what: difference}} to <folder>/differences.json
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from mcore_ckpt.models.low_rank import PEFT_PREFIX
from mcore_ckpt.models.registry import model_from_config
from tests.support.bridge_peft import add_peft_to_path, import_peft
from tests.support.global_tensors import to_mcore
from tests.support.parity import TOKENS, build, load, tokens
from tests.support.tiny_models import make_hf_folder, read_config


@dataclass(frozen=True)
class Case:
    """A model and the arguments of Megatron-Bridge's class of adapters."""

    model: str
    kind: str = "LoRA"
    arguments: dict[str, Any] = field(default_factory=dict)
    in_ci: bool = True


_MODULES = {"LoRA": "lora", "CanonicalLoRA": "canonical_lora", "DoRA": "dora"}
_LATENT = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
CASES = {
    "lora": Case("qwen3"),
    "canonical": Case("qwen3", "CanonicalLoRA"),
    "dora": Case("qwen3", "DoRA"),
    "experts": Case("qwen3_moe"),
    "latent": Case("deepseek_v3", arguments={"target_modules": _LATENT}),
    "some-layers": Case("qwen2", arguments={"target_modules": ["*.layers.1.*.linear_qkv", "linear_fc2"]}),
    "excluded": Case("llama", arguments={"target_modules": [], "exclude_modules": ["linear_fc1", "output_layer"]}),
    "experts-of-smaller-rank": Case("qwen3_moe", arguments={"normalize_moe_lora": True}, in_ci=False),
    "canonical-some": Case(
        "qwen2", "CanonicalLoRA", {"target_modules": ["linear_q", "linear_k", "linear_v"]}, in_ci=False
    ),
    "mixtral": Case("mixtral", in_ci=False),
    "tied": Case("qwen2-tied", in_ci=False),
}
ALPHA, DIM = 6, 4


def main(root: Path, names: list[str]) -> None:
    add_peft_to_path()
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    for name in names:
        make_hf_folder(root / name / "hf", CASES[name].model)
    # Before megatron is made to do without a GPU, lest that reach transformers.
    import peft  # noqa: F401
    from megatron.core import parallel_state, tensor_parallel

    enable_cpu()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    differences = {name: compare(root / name, CASES[name]) for name in names}
    (root / "differences.json").write_text(json.dumps(differences))
    torch.distributed.destroy_process_group()


def compare(root: Path, case: Case) -> dict[str, float]:
    from mcore_ckpt import CheckpointConfig, CheckpointManager, load_hf
    from mcore_ckpt.tools.convert.merge import MergeRequest, merge

    hf = root / "hf"
    hf_model = model_from_config(read_config(hf))
    model = build(hf_model)
    load(model, to_mcore(hf_model, load_file(hf / "model.safetensors")))
    adapted = getattr(import_peft(_MODULES[case.kind]), case.kind)(dim=DIM, alpha=ALPHA, **case.arguments)
    (model,) = adapted([model], training=True)
    model.eval()
    randomize(model)
    wanted = logits_of_megatron(model)

    roles = {"whole": CheckpointConfig(save_contents=("model",), load_contents=("model",))}
    roles["alone"] = CheckpointConfig(save_contents=("model",), load_contents=("model",), skip_frozen=True)
    for role, config in roles.items():
        manager = CheckpointManager(root / role, [model], role=role, config=config)
        manager.save(1).wait()
        manager.close()
    for role in roles:
        source = root / role
        merge(MergeRequest(source, root / f"{role}-peft", hf_model_path=hf, adapters="only"))
        merge(MergeRequest(source, root / f"{role}-merged", hf_model_path=hf))
    base = load_file(hf / "model.safetensors")
    whole, alone = (load_file(root / f"{role}-peft" / "adapter_model.safetensors") for role in roles)
    merged = [load_file(root / f"{role}-merged" / "model.safetensors") for role in roles]
    # Where a router's bias has changed, PEFT has the whole router, if the checkpoint has it.
    more = {name: whole.pop(name) for name in whole.keys() - alone.keys()}
    of_base = {name: base[name.removeprefix(PEFT_PREFIX)] for name in more}
    found = {
        "alone": float(not (same(whole, alone) and same(more, of_base) and same(*merged))),
        "peft": max(distance(logits_of_peft(hf, root / f"{role}-peft"), wanted) for role in roles),
        "merged": distance(logits_of_transformers(root / "whole-merged"), wanted),
    }

    # Back into a model whose adapters are gone; and the base anew, which leaves the adapters alone.
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    poison(model, lambda name: ".adapter." in name)
    load_hf([model], root / "whole-peft", base=hf)
    found["loaded"] = float(not same(before, dict(model.named_parameters())))
    poison(model, lambda name: ".adapter." not in name)
    load_hf([model], hf)
    found["base"] = float(not same(before, dict(model.named_parameters())))
    return found


def randomize(model: torch.nn.Module) -> None:
    """B begins with zeros, and A and the magnitudes would hide a wrong order."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight_magnitude"):
                parameter.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)
            elif ".adapter." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def poison(model: torch.nn.Module, which: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if which(name):
                parameter.fill_(math.nan)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logits_of_megatron(model: Any) -> torch.Tensor:
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1).expand(2, 1, TOKENS, TOKENS)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens(), positions, mask)
    return logits


def logits_of_transformers(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens()).logits
    return logits


def logits_of_peft(base: Path, adapter: Path) -> torch.Tensor:
    import warnings

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of keys that are missing
        adapted = PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        logits: torch.Tensor = adapted(input_ids=tokens()).logits
    return logits


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    # NaN must not compare as small.
    return float((one - other[..., : one.shape[-1]]).abs().max().nan_to_num(nan=1e9))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
