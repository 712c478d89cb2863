"""Tiny HuggingFace models on disk, one of each architecture and variant, made by transformers.

Nothing in them is what a mistake would leave: norms are not 1, biases not 0, theta is not 10000, the vocabulary is odd,
head_dim is not hidden / heads where the architecture allows it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.models.registry import known_architectures

VOCAB = 131
LAYERS = 4
EXPERTS = 4

_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 3e-6,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN_MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1}
_DEEPSEEK = {
    # That of the norms of latent queries, keys and values, whatever the config says (DeepseekV3Attention); megatron's
    # have the same as all others.
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_GLM4_MOE = {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_SHORT = {"rope_theta": 5000.0, "original_max_position_embeddings": 64}
_GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "swiglu_limit": 1.5,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **_SHORT},
}
_QWEN3_NEXT = {
    **_QWEN_MOE,
    "head_dim": 16,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}

_CONFIGS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3": ("llama", {"rope_parameters": _LLAMA_3, "max_position_embeddings": 16384}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-value": ("llama", {}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral-window": ("mistral", {"head_dim": 16, "sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **_SHORT}}),
    "qwen2-linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-value": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-value": ("qwen3", {"head_dim": 16}),
    "qwen2_moe": ("qwen2_moe", {**_QWEN_MOE, "shared_expert_intermediate_size": 48, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", {**_QWEN_MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-sparse": (
        "qwen3_moe",
        {**_QWEN_MOE, "head_dim": 16, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 16},
    ),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3-no-q-lora": ("deepseek_v3", {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1}),
    "deepseek_v3-yarn": ("deepseek_v3", {**_DEEPSEEK, "rope_parameters": _YARN}),
    "deepseek_v3-mtp": ("deepseek_v3", {**_DEEPSEEK, "num_nextn_predict_layers": 1}),
    "glm4_moe": ("glm4_moe", _GLM4_MOE),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
    "qwen3_next": ("qwen3_next", _QWEN3_NEXT),
    "glm4_moe-mtp": ("glm4_moe", {**_GLM4_MOE, "use_qk_norm": False, "num_nextn_predict_layers": 1}),
}

NAMES = tuple(_CONFIGS)
"""All models: the architecture's model_type, and after a dash what is special."""


def architecture_of(name: str) -> str:
    """The `model_type` of a tiny model."""
    return _CONFIGS[name][0]


def make_hf_folder(path: Path, name: str, **config_overrides: Any) -> Path:
    """Saves a tiny model with random weights, always the same ones, as transformers does.

    Args:
        path: the folder, made if needed.
        name: one of `NAMES`. "...-mtp" has a layer of multi-token prediction as published checkpoints have, with copies
            of the embedding and the head; transformers itself neither makes nor reads it.
        config_overrides: fields of the config to change; `dtype` (a string) is that of the weights, else "float32".

    Returns:
        `path`.
    """
    make_hf_model(name, **config_overrides).save_pretrained(path)
    if name.endswith("-mtp"):
        _add_mtp(path)
    return path


def make_hf_model(name: str, **config_overrides: Any) -> Any:
    """The transformers model that `make_hf_folder` saves, for eager attention."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    dtype = config_overrides.pop("dtype", "float32")
    kind = AutoModelForTokenClassification if name.endswith("-value") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        config = _config(name, **config_overrides)
        model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
        _fill(model)
    return model.to(getattr(torch, dtype)).eval()


def make_config(name: str, **config_overrides: Any) -> dict[str, Any]:
    """The `config.json` of a tiny model, without the model."""
    config: dict[str, Any] = _config(name, **config_overrides).to_dict()
    known = known_architectures()[architecture_of(name)]
    return {**config, "architectures": [known.classes[1 if name.endswith("-value") else 0]]}


def _config(name: str, **config_overrides: Any) -> Any:
    from transformers import AutoConfig

    model_type, special = _CONFIGS[name]
    labels = {"num_labels": 1} if name.endswith("-value") else {}
    return AutoConfig.for_model(model_type, **{**_DECODER, **special, **labels, **config_overrides})


def _fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or name.endswith("embed_scale"):
                continue
            if name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
                if model.config.model_type == "qwen3_next" and "linear_attn" not in name:
                    tensor.sub_(1.0)  # these multiply by 1 + weight
            elif name == "score.bias":
                tensor.zero_()  # mcore's value heads have none
            elif name.endswith("e_score_correction_bias"):
                tensor.uniform_(0.0, 0.3)  # transformers 4 ranks experts with negative scores otherwise
            elif tensor.dim() == 1:
                tensor.normal_(0.0, 0.3)
            else:
                tensor.normal_(0.0, 0.15)


def _add_mtp(path: Path) -> None:
    """A layer of multi-token prediction behind the last: that layer's tensors anew, and its own."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    last, new = (f"model.layers.{number}." for number in (LAYERS - 1, LAYERS))
    generator = torch.Generator().manual_seed(7)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return (torch.randn(tensor.shape, generator=generator) * 0.15 + (tensor.dim() == 1)).to(tensor.dtype)

    for name in [name for name in tensors if name.startswith(last)]:
        tensors[new + name.removeprefix(last)] = like(tensors[name])
    norm = tensors["model.norm.weight"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{new}{name}.weight"] = like(norm)
    tensors[f"{new}eh_proj.weight"] = like(torch.empty(norm.numel(), 2 * norm.numel(), dtype=norm.dtype))
    tensors[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})


def read_config(path: Path) -> dict[str, Any]:
    """A folder's `config.json`."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config
