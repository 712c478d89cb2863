"""Describes what a model computes with its tensors: the fields of its configuration that the tensors do not show.

For example, a model with four heads of size 8 and a model with two heads of size 16 have tensors of the same shapes.
Models with different kinds of rotary embeddings have tensors of the same shapes, too. So a checkpoint keeps the values
of these fields as facts, and a load compares the facts. This module only reads attributes. It reads them from the
configs of megatron-core 0.15 to 0.19, from Megatron-Bridge's providers, which have more fields, and from the configs
that transformers gives to vision towers.

All fields that the model reads are stored, not only fields that differ from their defaults, because another version of
megatron may have other defaults. The rotary frequencies are read from the live tensor, because attributes do not
determine them: HybridModel does not keep the base, GPTModel does not keep the factor of the scaling, and some trainers
write other frequencies into the tensor. Some tools cut tensors by the `config.json` of a checkpoint: `merge`, a
conversion for another trainer, and the export of a save. These tools first compare `config.json` with the facts
(`models/stated_facts.py`). The tools refuse a `config.json` with other attention heads, because the rows of the cut
tensors would be in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch

Facts = Mapping[str, Any]
"""Plain values by name. Names of a vision tower's facts begin with the name of the tower: `vision_model.`"""

_Values = Callable[[str], Any]

# The value of a missing field that has no known default. An unknown value is not compared.
_UNKNOWN = object()

# Every fact, by kind of model, with the value that counts if a version of megatron lacks the field. The facts of a kind
# are kept and compared only for models of this kind (`_KINDS`). For example, the config of a dense model also has a
# number of experts per token, but nothing reads this number.
_TABLE: Mapping[str, Mapping[str, Any]] = {
    "any": {
        "num_attention_heads": _UNKNOWN,
        "multi_latent_attention": False,
        "experimental_attention_variant": None,
        "softmax_scale": None,
        "softmax_type": "vanilla",
        "attention_output_gate": False,
        "qk_layernorm": False,
        "qk_l2_norm": False,
        "window_size": None,
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "layernorm_zero_centered_gamma": False,
        "apply_residual_connection_post_layernorm": False,
        "activation_func": "gelu",
        "activation_func_clamp_value": None,
        "gated_linear_unit": False,
        "glu_linear_offset": 0.0,
        "num_moe_experts": None,
        "position_embedding_type": _UNKNOWN,
        "share_embeddings_and_output_weights": _UNKNOWN,
        "is_hybrid_model": False,
        "mtp_use_repeated_layer": False,
        "use_mup": False,
        # The mask is read from the first layer's attention, because the layer spec sets the mask; the config does not.
        "attn_mask_type": _UNKNOWN,
        # Fields of Megatron-Bridge's providers of Gemma, Falcon-H1, MiMo, Step-3.5 and Qwen3-Omni.
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": None,
        "interleaved_attn_pattern": None,
        "scale_embeddings_by_hidden_size": False,
        "global_rotary_percent": None,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "mlp_multipliers": _UNKNOWN,
        "ssm_multipliers": _UNKNOWN,
        "attention_value_scale": _UNKNOWN,
        "hybrid_attention_pattern": _UNKNOWN,
        "sliding_window_rope_base": _UNKNOWN,
        "full_attention_rope_base": _UNKNOWN,
        "full_attention_rope_partial_factor": _UNKNOWN,
        "num_kv_shared_layers": _UNKNOWN,
        "layer_types": _UNKNOWN,
        "rotary_base_per_layer": _UNKNOWN,
        "swiglu_limits": _UNKNOWN,
        "position_id_per_seconds": _UNKNOWN,
        # Fields of transformers' configs of vision towers.
        "num_heads": None,
        "hidden_act": None,
        "patch_size": None,
        "spatial_merge_size": None,
        "fullatt_block_indexes": None,
        "deepstack_visual_indexes": None,
        "layer_norm_eps": None,
        "rms_norm_eps": None,
    },
    "heads": {"num_query_groups": None, "kv_channels": None},
    "latent": {
        "q_lora_rank": _UNKNOWN,
        "kv_lora_rank": _UNKNOWN,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "rope_type": "yarn",
    },
    "rotary": {
        "rotary_base": _UNKNOWN,
        "rotary_percent": _UNKNOWN,
        "rotary_interleaved": False,
        "rope_scaling": False,
        "rotary_frequencies": _UNKNOWN,
        "seq_len_interpolation_factor": None,
        "mrope_section": None,
        "no_rope_freq": None,
    },
    "llama3 rotary": {"rope_scaling_factor": _UNKNOWN},
    "latent yarn": {
        "rotary_scaling_factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    },
    "yarn": {
        "yarn_rotary_scaling_factor": _UNKNOWN,
        "yarn_original_max_position_embeddings": _UNKNOWN,
        "yarn_beta_fast": _UNKNOWN,
        "yarn_beta_slow": _UNKNOWN,
        "yarn_mscale": _UNKNOWN,
        "yarn_mscale_all_dim": _UNKNOWN,
        "yarn_correction_range_round_to_int": _UNKNOWN,
    },
    "window": {"window_attn_skip_freq": None},
    "dsa": {
        "dsa_indexer_n_heads": _UNKNOWN,
        "dsa_indexer_head_dim": _UNKNOWN,
        "dsa_indexer_topk": _UNKNOWN,
        "dsa_indexer_topk_freq": 1,
        "dsa_indexer_skip_topk_offset": 0,
        "dsa_indexer_rope_interleaved": False,
        "dsa_indexer_scoring_relu": True,
        "dsa_indexer_k_norm_epsilon": _UNKNOWN,
    },
    "delta net": {
        "linear_attention_freq": None,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "hybrid": {
        "hybrid_layer_pattern": _UNKNOWN,
        "mamba_state_dim": 128,
        "mamba_head_dim": 64,
        "mamba_num_groups": 8,
        "mamba_num_heads": None,
    },
    "experts": {
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_load_balancing_type": None,
        "moe_expert_capacity_factor": None,
        "moe_apply_probs_on_input": False,
        "moe_shared_expert_gate": False,
    },
    "repeated mtp": {"mtp_num_layers": None},
    "mup": {
        "mup_width_mult": 1.0,
        "mup_embedding_mult": 1.0,
        "mup_output_mult": 1.0,
        "mup_attn_scale_power": 1.0,
        "mup_base_head_dim": None,
    },
}
_DEFAULTS = {name: default for facts in _TABLE.values() for name, default in facts.items()}

_ROTARY = ("rope", "yarn", "mrope")

_KINDS: Mapping[str, Callable[[_Values], bool]] = {
    "any": lambda of: True,
    "heads": lambda of: not of("multi_latent_attention"),
    "latent": lambda of: bool(of("multi_latent_attention")),
    "rotary": lambda of: bool(of("multi_latent_attention")) or of("position_embedding_type") in _ROTARY,
    "llama3 rotary": lambda of: bool(of("rope_scaling")),
    "latent yarn": lambda of: bool(of("multi_latent_attention")) and of("rope_type") == "yarn",
    "yarn": lambda of: of("position_embedding_type") == "yarn" and not of("multi_latent_attention"),
    "window": lambda of: of("window_size") is not None,
    "dsa": lambda of: of("experimental_attention_variant") == "dsa",
    "delta net": lambda of: of("experimental_attention_variant") == "gated_delta_net",
    "hybrid": lambda of: bool(of("is_hybrid_model")),
    "experts": lambda of: bool(of("num_moe_experts")),
    # One layer of multi-token prediction runs at all depths, and is stored once. So no tensor shows the number of
    # depths.
    "repeated mtp": lambda of: bool(of("mtp_use_repeated_layer") and of("mtp_num_layers")),
    "mup": lambda of: bool(of("use_mup")),
}

# Facts that may differ on purpose: a longer context changes them, or only the training reads them.
_MAY_CHANGE = frozenset({*_TABLE["rotary"], *_TABLE["llama3 rotary"], *_TABLE["latent yarn"], *_TABLE["yarn"]}) - {
    *("rotary_percent", "rotary_interleaved", "mrope_section", "no_rope_freq")
} | {"sliding_window_rope_base", "full_attention_rope_base", "rotary_base_per_layer", "moe_expert_capacity_factor"}
# Facts that a longer context may also change, but only from one of these values to another.
_MAY_BECOME = {"position_embedding_type": ("rope", "yarn"), "rope_type": ("rope", "yarn")}
# The frequencies follow from these fields. If one of these fields differs, only the field is reported, not the
# frequencies.
_FREQUENCIES_FOLLOW = {"rotary_base", "rotary_percent", "kv_channels", "rope_scaling", "rope_scaling_factor"}
# A HybridModel has a layer for each part of a GPTModel's layer. A checkpoint of one class can be loaded into the other.
# So the fields in `_OF_LAYERS` are not compared between models of the two classes. The layers are compared when the
# tensors are matched (`sharding/counterparts.py`).
_OF_LAYERS = {
    *("is_hybrid_model", "experimental_attention_variant", "moe_layer_freq"),
    *("moe_shared_expert_gate", "mtp_use_repeated_layer", "mtp_num_layers"),
}

_SHOWN_BY_TENSORS = "share_embeddings_and_output_weights"

_FIELDS_OF_LATENT = ("rotary_base", "rotary_percent")

# The relative difference up to which two frequencies count as equal. It is large, because frequencies may come from
# buffers that were cast to bfloat16. `_TOLERANCE` is for all other numbers.
_FREQUENCY_TOLERANCE = 1e-2
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class DifferentFact:
    """A fact in which a checkpoint's model and another model differ.

    `may_change`: whether the fact may differ on purpose, such as for a longer context.
    """

    name: str
    saved: Any
    live: Any
    may_change: bool

    @property
    def text(self) -> str:
        """The difference in words, such as "num_attention_heads is 4 in the checkpoint and 2 here"."""
        return described([self])


def config_facts(transformer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of one language model, or of one tower.

    `transformer` is megatron's `TransformerConfig`, another config with the same fields, or a mapping with these
    fields. `arguments` are the arguments of megatron's model, such as `rotary_base`.
    """

    def raw(name: str) -> Any:
        is_mapping = isinstance(transformer, Mapping)
        found = transformer.get(name, _UNKNOWN) if is_mapping else getattr(transformer, name, _UNKNOWN)
        given = arguments.get(name)
        # Latent attention rotates by the config's fields in `_FIELDS_OF_LATENT` and ignores the arguments
        # (`MultiLatentAttention`, 0.16 to 0.19).
        overrides = name not in _FIELDS_OF_LATENT or found is _UNKNOWN or not raw("multi_latent_attention")
        return given if given is not None and overrides else found

    def value(name: str) -> Any:
        found = raw(name)
        found = _DEFAULTS[name] if found is _UNKNOWN else found
        normalize = _NORMAL_FORMS.get(name)
        return _plain(found if normalize is None or found is _UNKNOWN else normalize(raw, found))

    found = {name: value(name) for kind, names in _TABLE.items() if _KINDS[kind](value) for name in names}
    # A field that this version of megatron does not have is left out if its value is the default.
    return {
        name: each
        for name, each in found.items()
        if each is not _UNKNOWN and (raw(name) is not _UNKNOWN or each != _DEFAULTS[name])
    }


def different_facts(saved: Facts, live: Facts) -> Iterator[DifferentFact]:
    """Yields the facts that differ.

    A part that only one of the two models has, such as a tower, is not compared: the tensors already show the
    difference.
    """
    ours, theirs = _by_part(saved), _by_part(live)
    for part in ours:
        if part in theirs:
            found = list(_different(ours[part], theirs[part]))
            told = {each.name for each in found}
            for each in found:
                if each.name != "rotary_frequencies" or not told & _FREQUENCIES_FOLLOW:
                    yield DifferentFact(part + each.name, each.saved, each.live, each.may_change)


def hidden_differences(saved: Facts, live: Facts) -> list[DifferentFact]:
    """Returns the facts that differ and that no tensor shows.

    Leaves out whether the output head shares the embedding. Tensors show this fact, and a critic may differ in this
    fact from its language model.
    """
    return [each for each in different_facts(saved, live) if not each.name.endswith(_SHOWN_BY_TENSORS)]


def described(differences: Sequence[DifferentFact], saved: str = "in the checkpoint", live: str = "here") -> str:
    """Describes differences for a message. `saved` and `live` say where the two values are."""
    return "; ".join(f"{each.name} is {each.saved} {saved} and {each.live} {live}" for each in differences)


def _different(saved: Facts, live: Facts) -> Iterator[DifferentFact]:
    sides = [partial(_stored, facts) for facts in (saved, live)]
    not_compared = _OF_LAYERS if bool(sides[0]("is_hybrid_model")) != bool(sides[1]("is_hybrid_model")) else set()
    for kind, names in _TABLE.items():
        if not all(_KINDS[kind](side) for side in sides):
            continue
        for name in names:
            ours, theirs = (side(name) for side in sides)
            if name not in not_compared and not _are_alike(name, ours, theirs):
                yield DifferentFact(name, ours, theirs, _may_change(name, ours, theirs))


def _may_change(name: str, ours: Any, theirs: Any) -> bool:
    return name in _MAY_CHANGE or all(each in _MAY_BECOME.get(name, ()) for each in (ours, theirs))


def _stored(facts: Facts, name: str) -> Any:
    return facts.get(name, _DEFAULTS[name])


def _are_alike(name: str, left: Any, right: Any) -> bool:
    if left is _UNKNOWN or right is _UNKNOWN:
        return True
    if name == "hybrid_layer_pattern" and isinstance(left, str) and isinstance(right, str):
        left, right = _of_same_depth(left, right), _of_same_depth(right, left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(_are_alike(name, *pair) for pair in zip(left, right, strict=True))
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        tolerance = _FREQUENCY_TOLERANCE if name == "rotary_frequencies" else _TOLERANCE
        return math.isclose(left, right, rel_tol=tolerance)
    return bool(left == right)


def _of_same_depth(pattern: str, other: str) -> str:
    """Returns `pattern`, without the depths of multi-token prediction if `other` has no such depths."""
    return pattern if "/" in other else pattern.partition("/")[0]


def _by_part(facts: Facts) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in facts.items():
        part, dot, field = name.rpartition(".")
        found.setdefault(part + dot, {})[field] = value
    return found


def _plain(value: Any) -> Any:
    """Returns a value in the types of JSON. A function, enum or other object becomes its name, or "unknown"."""
    if value is None or value is _UNKNOWN or isinstance(value, (bool, int, str)):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, partial):
        given = [str(_plain(each)) for each in value.args]
        given += [f"{name}={_plain(each)}" for name, each in sorted(value.keywords.items())]
        return f"{_plain(value.func)}({', '.join(given)})"
    name = getattr(value, "__name__", None) or getattr(value, "name", None) or type(value).__name__
    return "unknown" if not isinstance(name, str) or "<" in name or not name.isprintable() else name


# -- values that megatron takes in several forms ---------------------------------------------------------------


def _groups(of: _Values, groups: Any) -> Any:
    return groups if groups is not None else of("num_attention_heads")


def _head_size(of: _Values, size: Any) -> Any:
    hidden, heads = of("hidden_size"), of("num_attention_heads")
    return hidden // heads if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads else size


def _softmax_scale(of: _Values, scale: Any) -> Any:
    """Returns None for the scale that megatron uses by default (`DotProductAttention`, 0.16 to 0.19)."""
    size = _head_size(of, of("kv_channels"))
    usual = isinstance(size, int) and size and isinstance(scale, (int, float)) and math.isclose(scale, size**-0.5)
    return None if usual and of("multi_latent_attention") in (False, _UNKNOWN) else scale


def _moe_layer_freq(of: _Values, freq: Any) -> Any:
    count = of("num_layers")
    if isinstance(freq, int) and isinstance(count, int):
        freq = [int(number % freq == 0) for number in range(count)]
    return 1 if freq == 1 or (isinstance(freq, (list, tuple)) and all(freq)) else freq


def _skipping(of: _Values, freq: Any) -> Any:
    count = of("num_layers")
    if isinstance(freq, int) and isinstance(count, int) and freq:
        return [int((number + 1) % freq != 0) for number in range(count)]
    return freq


def _without_rope(of: _Values, freq: Any) -> Any:
    """Returns a number for each layer: 1 if the layer does not rotate, else 0 (`TransformerConfig`, 0.16 to 0.19).

    Returns None if all layers rotate.
    """
    layers = _skipping(of, freq)
    if isinstance(layers, list) and layers is not freq:
        layers = [1 - rotates for rotates in layers]
    return None if isinstance(layers, (list, tuple)) and not any(layers) else layers or None


def _window_skips(of: _Values, freq: Any) -> Any:
    freq, pattern = _skipping(of, freq), of("hybrid_layer_pattern")
    if isinstance(pattern, str) and isinstance(freq, (list, tuple)):
        # Keeps only the values of layers with attention, so that a HybridModel can be compared with a GPTModel.
        symbols = pattern.partition("/")[0].replace("|", "")
        freq = [value for symbol, value in zip(symbols, freq, strict=False) if symbol in "*GD+"]
    return None if isinstance(freq, (list, tuple)) and all(freq) else freq


def _pre_softmax(of: _Values, value: Any) -> Any:
    """Returns False for routers without a softmax (`topk_routing_with_score_function`, 0.16 to 0.19)."""
    return value if of("moe_router_score_function") in ("softmax", _UNKNOWN) else False


def _sinkhorn(of: _Values, kind: Any) -> Any:
    """Returns "sinkhorn", the only kind of load balancing that changes a token's experts; None for all other kinds."""
    return "sinkhorn" if kind == "sinkhorn" or (isinstance(kind, (list, tuple)) and "sinkhorn" in kind) else None


_NORMAL_FORMS: Mapping[str, Callable[[_Values, Any], Any]] = {
    "num_query_groups": _groups,
    "kv_channels": _head_size,
    "softmax_scale": _softmax_scale,
    "moe_layer_freq": _moe_layer_freq,
    "linear_attention_freq": _skipping,
    "window_attn_skip_freq": _window_skips,
    "no_rope_freq": _without_rope,
    # A mask that also hides padding gives real tokens the same results as a mask without this effect, so both count as
    # equal.
    "attn_mask_type": lambda of, mask: {"padding_causal": "causal", "padding": "no_mask"}.get(_plain(mask), mask),
    "moe_router_pre_softmax": _pre_softmax,
    "moe_router_load_balancing_type": _sinkhorn,
    "moe_router_topk_scaling_factor": lambda of, factor: None if factor == 1 else factor,
    "dsa_indexer_k_norm_epsilon": lambda of, epsilon: of("layernorm_epsilon") if epsilon is None else epsilon,
    # Not every trainer sets `is_hybrid_model`, so a model with a pattern of layers counts as hybrid, too.
    "is_hybrid_model": lambda of, is_hybrid: bool(is_hybrid) or isinstance(of("hybrid_layer_pattern"), str),
    "hybrid_layer_pattern": lambda of, pattern: pattern.replace("|", "") if isinstance(pattern, str) else pattern,
}
