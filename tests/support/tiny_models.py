"""Tiny HuggingFace models on disk, one of each architecture and variant, made by transformers.

Nothing in them is what a mistake would leave: norms are not 1, biases not 0, theta is not 10000, the vocabulary is odd,
head_dim is not hidden / heads where the architecture allows it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
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

_QWEN3_5 = {
    **{name: value for name, value in _QWEN3_NEXT.items() if name.startswith(("linear_", "layer_types", "head_dim"))},
    # Published models have it, and GPTModel's rotary embeddings, which know text only, are the same without it.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
_QWEN3_5_MOE = {
    **_QWEN3_5,
    "intermediate_size": None,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
_MINIMAX_M2 = {"head_dim": 16, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "rotary_dim": 8}
_DEEPSEEK_V2 = {
    **{name: value for name, value in _DEEPSEEK.items() if name not in ("num_nextn_predict_layers", "norm_topk_prob")},
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}
# Two groups of four, of two experts each, and three experts of them: their best ones are in other groups than the best
# three of all.
_IN_GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
}

_NEMOTRON_H = {
    "head_dim": 16,
    # That of a Mamba mixer's norm, which megatron does not let anyone choose.
    "layer_norm_epsilon": 1e-5,
    "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "n_groups": 4,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}

_SPARSE = {
    **_DEEPSEEK,
    "index_n_heads": 4,
    "index_head_dim": 16,
    # Fewer than the tokens of a test.
    "index_topk": 6,
}
# No three equal sections, and more than one number of them to a half of a head.
_SECTIONS = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 3, 4]}
_QWEN3_VL = {"head_dim": 16, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}}
_QWEN2_5_VL = {"rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2]}, "use_sliding_window": False}
_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}
_TOWER_3 = {**_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
# By model_type, the config of the vision tower.
_TOWERS: dict[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {**_TOWER, "fullatt_block_indexes": [1], "window_size": 8},
    "qwen3_vl": _TOWER_3,
    "qwen3_vl_moe": _TOWER_3,
    "qwen3_5": {**_TOWER, "num_position_embeddings": 16},
    "qwen3_5_moe": {**_TOWER, "num_position_embeddings": 16},
    "kimi_k25": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "patch_size": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 6,
        "merge_kernel_size": [2, 2],
    },
}
# Fields of such a config beside its sections.
_OF_WHOLE: dict[str, Mapping[str, Any]] = {"kimi_k25": {"projection_hidden_size": 32}}
IMAGE_TOKEN = VOCAB - 4

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
    "deepseek_v32": ("deepseek_v32", _SPARSE),
    "deepseek_v32-mtp": ("deepseek_v32", {**_SPARSE, "rope_parameters": _YARN, "num_nextn_predict_layers": 1}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_SPARSE, "n_group": 1}),
    "glm_moe_dsa-shared": ("glm_moe_dsa", {**_SPARSE, "indexer_types": ["full", "full", "shared", "full"]}),
    "glm4_moe": ("glm4_moe", _GLM4_MOE),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
    "qwen3_next": ("qwen3_next", _QWEN3_NEXT),
    "qwen3_next-mtp": ("qwen3_next", _QWEN3_NEXT),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.1}),
    "seed_oss-value": ("seed_oss", {"head_dim": 16, "attention_bias": False}),
    "qwen3_5_text": ("qwen3_5_text", _QWEN3_5),
    "qwen3_5_text-mtp": (
        "qwen3_5_text",
        {**_QWEN3_5, "full_attention_interval": 2, "layer_types": None, "mtp_num_hidden_layers": 1},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _QWEN3_5_MOE),
    "qwen3_5_moe_text-mtp": ("qwen3_5_moe_text", {**_QWEN3_5_MOE, "mtp_num_hidden_layers": 1}),
    "minimax_m2": ("minimax_m2", _MINIMAX_M2),
    "deepseek_v2": ("deepseek_v2", {**_DEEPSEEK_V2, **_IN_GROUPS}),
    "deepseek_v2-lite": ("deepseek_v2", {**_DEEPSEEK_V2, "q_lora_rank": None}),
    "deepseek_v2-yarn": (
        "deepseek_v2",
        {**_DEEPSEEK_V2, "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "nemotron_h": ("nemotron_h", _NEMOTRON_H),
    # As in Nemotron-3: its experts work on a projection, and a depth of multi-token prediction is a stack of layers.
    "nemotron_h-latent": ("nemotron_h", {**_NEMOTRON_H, "moe_latent_size": 24}),
    "nemotron_h-mtp": ("nemotron_h", {**_NEMOTRON_H, "num_nextn_predict_layers": 1}),
    "qwen2_5_vl": ("qwen2_5_vl", _QWEN2_5_VL),
    "qwen2_5_vl-tied": ("qwen2_5_vl", {**_QWEN2_5_VL, "tie_word_embeddings": True}),
    "qwen3_vl": ("qwen3_vl", _QWEN3_VL),
    "qwen3_vl-tied": ("qwen3_vl", {**_QWEN3_VL, "tie_word_embeddings": True}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {**_QWEN_MOE, **_QWEN3_VL}),
    "qwen3_5": ("qwen3_5", _QWEN3_5),
    "qwen3_5_moe": ("qwen3_5_moe", _QWEN3_5_MOE),
    "kimi_k25": ("kimi_k25", _DEEPSEEK),
    "glm4_moe-mtp": ("glm4_moe", {**_GLM4_MOE, "use_qk_norm": False, "num_nextn_predict_layers": 1}),
}

ZERO_CENTRED = ("qwen3_next", "qwen3_5")
"""The beginnings of `model_type` of models whose norms multiply by 1 + weight."""

NAMES = tuple(_CONFIGS)
"""All models: the architecture's model_type, and after a dash what is special."""


def architecture_of(name: str) -> str:
    """The `model_type` of a tiny model."""
    return _CONFIGS[name][0]


# Modules that came with megatron 0.18 (HybridModel) and 0.19 (with an indexer that computes what DeepSeek's does).
_NEWER = {"nemotron_h": "megatron.core.models.hybrid"} | dict.fromkeys(
    ("deepseek_v32", "glm_moe_dsa"), "megatron.core.transformer.experimental_attention_variant.dsa_masking"
)


def megatron_has(name: str) -> bool:
    """Whether the megatron on the path has the modules of a tiny model."""
    return find_spec(_NEWER.get(architecture_of(name), "megatron.core")) is not None


def has_tower(name: str) -> bool:
    """Whether a tiny model is a vision-language model."""
    return architecture_of(name) in _TOWERS


def computes_images(name: str) -> bool:
    """Whether megatron's model of a tiny model can compute what its tower makes of an image.

    Kimi-K2.5's tower is in Python files that come with the model; the tests have its tensors alone.
    """
    return has_tower(name) and architecture_of(name) != "kimi_k25"


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
    kept = _kept(name, config_overrides)
    if kept is None:
        _make(path, name, config_overrides)
        return path
    if not kept.is_dir():
        made = Path(tempfile.mkdtemp(dir=kept.parent))
        _make(made, name, config_overrides)
        with contextlib.suppress(OSError):  # another process has been faster
            made.rename(kept)
    path.mkdir(parents=True, exist_ok=True)
    for file in kept.iterdir():
        shutil.copyfile(file, path / file.name)
    return path


def _kept(name: str, config_overrides: dict[str, Any]) -> Path | None:
    """Where all processes of one run of scripts/test.sh keep a model: it takes 30 times as long to make as to copy."""
    folder = os.environ.get("TESTS_MODELS")
    if not folder or not os.access(folder, os.W_OK):
        return None
    overrides = zlib.crc32(repr(sorted(config_overrides.items())).encode())
    return Path(folder, f"{name}-{overrides:08x}-{_transformers_version()}")


@functools.cache
def _transformers_version() -> str:
    """That of this process: frameworks come with another one."""
    return metadata.version("transformers")


def _make(path: Path, name: str, config_overrides: dict[str, Any]) -> None:
    make_hf_model(name, **config_overrides).save_pretrained(path)
    if name.endswith("-mtp"):
        _add_mtp(path)
    if architecture_of(name) == "qwen3_vl_moe":
        _transpose_experts(path)
    if architecture_of(name) == "kimi_k25":
        _rename(path, AS_TRANSFORMERS_WRITES_KIMI)


def make_hf_model(name: str, **config_overrides: Any) -> Any:
    """The transformers model that `make_hf_folder` saves, for eager attention."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification

    dtype = config_overrides.pop("dtype", "float32")
    kind = AutoModelForTokenClassification if name.endswith("-value") else AutoModelForCausalLM
    kind = AutoModelForImageTextToText if has_tower(name) else kind
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
    fields = {**_DECODER, **special, **labels, **config_overrides}
    if not has_tower(name):
        return AutoConfig.for_model(model_type, **fields)
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VOCAB - 3}
    tokens |= {"vision_start_token_id": VOCAB - 2, "vision_end_token_id": VOCAB - 1}
    tied = {"tie_word_embeddings": fields["tie_word_embeddings"]}
    return AutoConfig.for_model(
        model_type,
        text_config=fields,
        vision_config=dict(_TOWERS[model_type]),
        **_OF_WHOLE.get(model_type, {}),
        **tokens,
        **tied,
    )


def _fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or name.endswith("embed_scale"):
                continue
            if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")):
                tensor.uniform_(0.5, 1.5)
                if model.config.model_type.startswith(ZERO_CENTRED) and "linear_attn" not in name:
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
    """A layer of multi-token prediction behind the last: that layer's tensors anew, and its own.

    Nemotron-3 has two, an attention layer with the first tensors of its own, and a layer of experts with the last.
    """
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    is_hybrid, is_qwen = "backbone.norm_f.weight" in tensors, read_config(path)["model_type"].startswith(ZERO_CENTRED)
    news = {f"model.layers.{LAYERS - 1}.": "mtp.layers.0." if is_qwen else f"model.layers.{LAYERS}."}
    if is_hybrid:
        news = {"backbone.layers.1.": "mtp.layers.0.", "backbone.layers.2.": "mtp.layers.1."}
    generator = torch.Generator().manual_seed(7)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return (torch.randn(tensor.shape, generator=generator) * 0.15 + (tensor.dim() == 1)).to(tensor.dtype)

    for old, new in news.items():
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = like(tensors[name])
    *_, last = first, *_ = news.values()
    norms = [f"{first}enorm", f"{first}hnorm", f"{last}shared_head.norm"]
    if is_hybrid:
        norms[2] = f"{last}final_layernorm"
    if is_qwen:
        norms = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
    norm = tensors["backbone.norm_f.weight" if is_hybrid else "model.norm.weight"]
    for name in norms:
        tensors[f"{name}.weight"] = like(norm)
    projection = "mtp.fc.weight" if is_qwen else f"{first}eh_proj.weight"
    tensors[projection] = like(torch.empty(norm.numel(), 2 * norm.numel(), dtype=norm.dtype))
    if not (is_hybrid or is_qwen):
        tensors[f"{first}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{first}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})


def mtp_prefix(path: Path) -> str:
    """The beginning of the names of a folder's multi-token prediction."""
    has_own_names = read_config(path)["model_type"].startswith((*ZERO_CENTRED, "nemotron_h"))
    return "mtp." if has_own_names else f"model.layers.{LAYERS}."


AS_TRANSFORMERS_WRITES_KIMI = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}
"""How transformers 5.23 begins names of Kimi-K2.5, and how they are published, which it reads itself."""


def _rename(path: Path, beginnings: Mapping[str, str]) -> None:
    """Replaces the beginnings of names in a folder."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    for old, new in beginnings.items():
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)
    save_file(tensors, file, {"format": "pt"})


def _transpose_experts(path: Path) -> None:
    """As Qwen3-VL-MoE is published. transformers 5 writes so only a model that it has read."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})


def read_config(path: Path) -> dict[str, Any]:
    """A folder's `config.json`."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """A config with each field of a vision-language model's language model by itself."""
    text = config.get("text_config") or {}
    whole = {name: value for name, value in config.items() if name != "text_config"}
    return {**whole, **{f"text_config.{name}": value for name, value in text.items()}}
