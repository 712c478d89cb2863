"""Rules that several architectures share, and tuples of these rules for decoders, routers and latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.config_fields import (
    MTP_FIELDS,
    Constant,
    HfConfig,
    HfFields,
    McoreValues,
    Refused,
    Rule,
    Same,
    factor_or_none,
    needed,
)
from mcore_ckpt.models.rope_rules import LatentRope


class QueryGroups:
    """The rule for the number of query groups. Without `num_key_value_heads`, each attention head is its own group."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        groups = hf.get("num_key_value_heads")
        return {"num_query_groups": needed(hf, "num_attention_heads") if groups is None else groups}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {"num_key_value_heads": mcore["num_query_groups"]}


class HeadDim:
    """The rule for the size of an attention head. Without `head_dim`, the size is hidden_size / num_attention_heads."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        size = hf.get("head_dim")
        return {"kv_channels": needed(hf, "hidden_size") // needed(hf, "num_attention_heads") if size is None else size}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {"head_dim": mcore["kv_channels"]}


class Silu:
    """The rule for the usual activation, a gated linear unit with SiLU."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        from torch.nn.functional import silu

        if needed(hf, "hidden_act") not in ("silu", "swish"):
            raise UnsupportedError(f"config.json: hidden_act is {hf['hidden_act']!r}: only 'silu' can be converted")
        return {"gated_linear_unit": True, "activation_func": silu}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {"hidden_act": "silu"}


class SquaredRelu:
    """The rule for the activation `relu(x) ** 2`, which has no gate."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        from megatron.core.activations import squared_relu

        Refused("mlp_hidden_act", "relu2").to_mcore(hf)
        return {"gated_linear_unit": False, "activation_func": squared_relu}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {"mlp_hidden_act": "relu2"}


class ClampedGlu:
    """The rule for gpt-oss's activation: `(up + 1) * gate * sigmoid(1.702 * gate)`, with clamped `up` and `gate`."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        from megatron.core.activations import quick_gelu

        # The factor 1.702 is fixed in megatron: quick_gelu is x * sigmoid(1.702 * x).
        Refused("swiglu_alpha", 1.702).to_mcore(hf)
        limit = hf.get("swiglu_limit")
        return {
            "gated_linear_unit": True,
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0 if limit is None else limit,
        }

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {"swiglu_limit": mcore["activation_func_clamp_value"]}


class Dtype:
    """The rule for the dtype of the weights: `torch_dtype` in transformers 4, `dtype` in transformers 5."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        import torch

        name = hf.get("dtype") or hf.get("torch_dtype") or "float32"
        dtype = getattr(torch, str(name), None)
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedError(f"config.json: dtype is {name!r}, but must be float32, bfloat16 or float16")
        return {"params_dtype": dtype}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        name = str(mcore["params_dtype"]).removeprefix("torch.")
        return {"torch_dtype": name} if "torch_dtype" in base and "dtype" not in base else {"dtype": name}


# --- Kinds of layers


def per_layer(hf: HfConfig, kind: str) -> list[bool] | None:
    """Returns, for each layer, whether its entry in `layer_types` is `kind`; None if there is no `layer_types`."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return None
    layers = needed(hf, "num_hidden_layers")
    if len(kinds) < layers:
        raise UnsupportedError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    return [each == kind for each in kinds[:layers]]


class SlidingWindow:
    """The rule for sliding-window attention in some or all layers.

    The size of HuggingFace's window includes the current token. The size of Megatron's window includes only the tokens
    before the current token (`get_sliding_window_causal_mask`, 0.16.1), so Megatron's size is smaller by 1.
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        window = hf.get("sliding_window")
        # In Qwen models, the window is off unless use_sliding_window is true. Other architectures do not have this
        # field.
        is_on = hf.get("use_sliding_window", not str(hf.get("model_type")).startswith("qwen"))
        layers = self._layers(hf) if window and is_on else []
        if not window or not any(layers):
            return {"window_size": None, "window_attn_skip_freq": None}
        freq = None if all(layers) else [int(layer) for layer in layers]
        return {"window_size": (window - 1, 0), "window_attn_skip_freq": freq}

    def _layers(self, hf: HfConfig) -> list[bool]:
        layers, kind = needed(hf, "num_hidden_layers"), hf.get("model_type")
        if kind == "qwen3_moe":
            return [True] * layers  # Qwen3MoeModel ignores layer_types and uses one mask for all layers.
        named = per_layer(hf, "sliding_attention")
        if named is not None:
            return named
        if kind == "gpt_oss":
            return [number % 2 == 0 for number in range(layers)]
        if "use_sliding_window" not in hf:
            return [True] * layers
        if kind in ("qwen2", "qwen3", "qwen2_5_vl", "qwen2_5_vl_text"):
            return [number >= needed(hf, "max_window_layers") for number in range(layers)]
        raise UnsupportedError(
            "config.json: use_sliding_window is true, but it depends on the version of transformers which layers have "
            "the window: add layer_types"
        )

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        window, freq, layers = mcore["window_size"], mcore["window_attn_skip_freq"], mcore["num_layers"]
        fields: HfFields = {"sliding_window": None if window is None else window[0] + 1}
        is_switched = str(base.get("model_type")).startswith("qwen") and window is not None
        if "use_sliding_window" in base or is_switched:
            fields["use_sliding_window"] = window is not None
        if "layer_types" in base or freq is not None or is_switched:
            slides = [window is not None] * layers if freq is None else freq
            fields["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
        return fields


def is_sparse(hf: HfConfig) -> list[bool]:
    """Returns, for each layer of a Qwen model, whether the layer is a mixture of experts."""
    step, dense = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or []
    return [(number + 1) % step == 0 and number not in dense for number in range(needed(hf, "num_hidden_layers"))]


def _moe_freq(layers: Sequence[bool]) -> int | list[int]:
    return 1 if all(layers) else [int(layer) for layer in layers]


def _moe_pattern(mcore: McoreValues) -> list[int]:
    freq = mcore["moe_layer_freq"]
    return [1] * mcore["num_layers"] if isinstance(freq, int) else list(freq)


class SparseStep:
    """The rule that says which layers of a Qwen model are mixtures of experts.

    If Qwen's `decoder_sparse_step` is n, the last of every n layers has experts. If megatron's `moe_layer_freq` is n,
    the first of every n layers has experts. This rule therefore writes `moe_layer_freq` as a list with an entry for
    each layer.
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        return {"moe_layer_freq": _moe_freq(is_sparse(hf))}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        dense = [number for number, moe in enumerate(_moe_pattern(mcore)) if not moe]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


class DenseFirst:
    """The rule for the number of dense layers that precede the layers with experts."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        dense = hf.get("first_k_dense_replace") or 0
        return {"moe_layer_freq": _moe_freq([n >= dense for n in range(needed(hf, "num_hidden_layers"))])}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {"first_k_dense_replace": _moe_pattern(mcore).count(0)}


def is_linear(hf: HfConfig) -> list[bool]:
    """Returns, for each layer of a Qwen3-Next model, whether the layer has linear attention."""
    named = per_layer(hf, "linear_attention")
    if named is not None:
        return named
    every = hf.get("full_attention_interval") or 4
    return [(number + 1) % every != 0 for number in range(needed(hf, "num_hidden_layers"))]


class LinearLayers:
    """The rule that says which layers have linear attention (GatedDeltaNet)."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        layers = [int(layer) for layer in is_linear(hf)]
        return {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": layers}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        layers = mcore["linear_attention_freq"]
        return {"layer_types": ["linear_attention" if layer else "full_attention" for layer in layers]}


# --- Experts


@dataclass(frozen=True)
class NormalizedTopk:
    """The rule for whether the weights of a token's experts add up to 1.

    If they add up to 1, megatron applies the softmax only to the chosen experts. Otherwise megatron applies the softmax
    to all experts.

    Attributes:
        always: True if the weights add up to 1 in all models of the architecture. The configs of these models need not
            have the field `norm_topk_prob`.
    """

    always: bool = False

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        if self.always:
            Refused("norm_topk_prob", True).to_mcore(hf)
        normalized = self.always or bool(needed(hf, "norm_topk_prob"))
        if normalized and needed(hf, "num_experts_per_tok") == 1:
            given = "the weights of experts add up to 1" if self.always else "norm_topk_prob is true"
            raise UnsupportedError(
                f"config.json: {given} with num_experts_per_tok 1: this cannot be converted, because megatron-core "
                "0.16.1 (TopKRouter) does not normalize the weight of a single expert to 1"
            )
        return {"moe_router_pre_softmax": not normalized}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {} if self.always else {"norm_topk_prob": not mcore["moe_router_pre_softmax"]}


class SigmoidScores:
    """The rule for the way in which DeepSeek's router chooses experts.

    The router scores experts with a sigmoid. A bias influences which experts are chosen, but not the weights of the
    chosen experts. The router first chooses groups of experts, and then experts from these groups.
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        for rule in (
            Refused("scoring_func", "sigmoid"),
            Refused("topk_method", "noaux_tc"),
            Refused("moe_layer_freq", 1),
        ):
            rule.to_mcore(hf)
        # topk_routing_with_score_function (0.16.1) normalizes the weights if several experts are chosen, but not the
        # weight of a single expert. norm_topk_prob must agree with this behaviour.
        topk = needed(hf, "num_experts_per_tok")
        Refused("norm_topk_prob", topk > 1).to_mcore(hf)
        groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
        if chosen >= groups:
            groups = chosen = None
        elif topk // chosen != 2:
            # DeepSeek ranks groups by their 2 best experts. Megatron's group_limited_topk (0.16.1) ranks groups by
            # their topk // group_topk best experts.
            raise UnsupportedError(
                f"config.json: num_experts_per_tok {topk} with topk_group {chosen} cannot be converted: megatron-core "
                f"0.16.1 ranks groups by their {topk // chosen} best experts, but DeepSeek ranks groups by their 2 best"
            )
        return {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": factor_or_none(needed(hf, "routed_scaling_factor")),
            "moe_router_num_groups": groups,
            "moe_router_group_topk": chosen,
        }

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        scaling = mcore["moe_router_topk_scaling_factor"]
        return {
            "norm_topk_prob": mcore["moe_router_topk"] > 1,
            "routed_scaling_factor": 1.0 if scaling is None else scaling,
            "n_group": mcore["moe_router_num_groups"] or 1,
            "topk_group": mcore["moe_router_group_topk"] or 1,
        }


class SharedExperts:
    """The rule for shared experts. HuggingFace's config states their number.

    Megatron has one shared expert that is as large as all of HuggingFace's shared experts together.
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        size = (hf.get("n_shared_experts") or 0) * needed(hf, "moe_intermediate_size")
        return {"moe_shared_expert_intermediate_size": size or None}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        size = mcore["moe_shared_expert_intermediate_size"] or 0
        return {"n_shared_experts": size // mcore["moe_ffn_hidden_size"]}


@dataclass(frozen=True)
class Mtp:
    """The rule for the number of multi-token-prediction layers. 0 becomes None in Megatron, which fails with 0."""

    hf: str = MTP_FIELDS[0]

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        return {"mtp_num_layers": hf.get(self.hf) or None}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {self.hf: mcore["mtp_num_layers"] or 0}


class LatentHead:
    """The rule for `q_lora_rank`, and for `kv_channels`, for which `config.json` has no field.

    Latent attention itself does not use `kv_channels`. But in Megatron's local layer spec, the shape of the attention's
    output depends on `kv_channels`, so `kv_channels` must equal `v_head_dim`.
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        return {"kv_channels": needed(hf, "v_head_dim"), "q_lora_rank": hf.get("q_lora_rank")}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {"q_lora_rank": mcore["q_lora_rank"]}


_DECODER: tuple[Rule, ...] = (
    Same("num_layers", "num_hidden_layers"),
    Same("hidden_size", "hidden_size"),
    Same("num_attention_heads", "num_attention_heads"),
    QueryGroups(),
    Same("layernorm_epsilon", "rms_norm_eps"),
    Same("attention_dropout", "attention_dropout", default=0.0),
    Constant("hidden_dropout", 0.0),
    Constant("normalization", "RMSNorm"),
    Dtype(),
    Same("gpt.vocab_size", "vocab_size"),
    Same("gpt.max_sequence_length", "max_position_embeddings"),
    Same("gpt.share_embeddings_and_output_weights", "tie_word_embeddings", default=False),
)
_SILU: tuple[Rule, ...] = (Silu(), Constant("add_bias_linear", False))

_FFN = Same("ffn_hidden_size", "intermediate_size")

DECODER: tuple[Rule, ...] = (*_DECODER, _FFN, HeadDim())
"""The rules of every decoder without latent attention. Rules for activation, biases and rotary embeddings are not
included.
"""

DENSE: tuple[Rule, ...] = (*DECODER, *_SILU)
"""`DECODER`, the SiLU activation, and `add_bias_linear` set to False. Rules for rotary embeddings are not included."""

SPARSE: tuple[Rule, ...] = (*_DECODER, HeadDim(), *_SILU)
"""`DENSE` for an architecture that has no dense layer, and no `intermediate_size` in its configs."""

EXPERT_COUNT: tuple[Rule, ...] = (
    Same("num_moe_experts", "num_local_experts", also=("num_experts",)),
    Same("moe_router_topk", "num_experts_per_tok"),
)
SOFTMAX_ROUTER: tuple[Rule, ...] = (*EXPERT_COUNT, NormalizedTopk())
SIGMOID_ROUTER: tuple[Rule, ...] = (
    Same("num_moe_experts", "n_routed_experts"),
    Same("moe_router_topk", "num_experts_per_tok"),
    Same("moe_ffn_hidden_size", "moe_intermediate_size"),
    SigmoidScores(),
    DenseFirst(),
    SharedExperts(),
    Mtp(),
)

LATENT_ATTENTION: tuple[Rule, ...] = (
    *_DECODER,
    _FFN,
    *_SILU,
    Constant("multi_latent_attention", True),
    # Here qk_layernorm means q_a_layernorm and kv_a_layernorm. The epsilon of these norms is 1e-6 in transformers
    # (DeepseekV3Attention) and layernorm_epsilon in megatron. For DeepSeek, layernorm_epsilon is 1e-6, too. For
    # Moonlight it is 1e-5, but the effect is far below bf16's rounding.
    Constant("qk_layernorm", True),
    LatentHead(),
    Same("kv_lora_rank", "kv_lora_rank"),
    Same("qk_head_dim", "qk_nope_head_dim"),
    Same("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    Same("v_head_dim", "v_head_dim"),
    Refused("rope_interleave", True),
    LatentRope(),
)
