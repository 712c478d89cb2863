"""Nemotron-H and Nemotron-3, hybrid models: each layer is a Mamba mixer, attention, an MLP or a mixture of experts.

A HybridModel (`Table.is_hybrid`) has one mixer per layer, like HuggingFace's model, so both models have the same layer
numbers. The rules also translate `hybrid_layer_pattern`, but without pipeline stages, because the trainer chooses the
stages. A depth of multi-token prediction is a stack of layers with one mixer each (`ModelFacts.mtp_stack`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import EXPERT, attention, facts_of, integer, sizes_of
from mcore_ckpt.models.config_fields import (
    Constant,
    HfConfig,
    HfFields,
    McoreValues,
    MissingFieldError,
    Refused,
    Rule,
    Same,
)
from mcore_ckpt.models.config_rules import Dtype, HeadDim, QueryGroups, SigmoidScores, SquaredRelu
from mcore_ckpt.models.table import MCORE_EMBEDDING, MCORE_HEAD, Row, Table

_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# The names of the kinds of layers in transformers 5.23, by megatron's symbols. Older configs call two of these kinds
# "mamba" and "attention".
_NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_SYMBOLS = {name: symbol for names in (_NAMES, _KINDS) for symbol, name in names.items()} | {
    each: each for each in _KINDS
}


def _pattern(config: HfConfig, names: str, symbols: str, default: str | None = None) -> str:
    """Reads the kinds of layers as megatron's symbols, from a list of names or from a text of symbols."""
    kinds = config.get(names) or config.get(symbols) or default
    if not kinds:
        raise MissingFieldError(f"config.json: {names} (or {symbols}) is missing")
    if unknown := sorted({str(kind) for kind in kinds if kind not in _SYMBOLS}):
        raise UnsupportedError(f"config.json: {names} (or {symbols}) has unknown kinds of layers: {', '.join(unknown)}")
    return "".join(_SYMBOLS[kind] for kind in kinds)


def _decoder(config: HfConfig) -> str:
    return _pattern(config, "layers_block_type", "hybrid_override_pattern")


def _depth(config: HfConfig) -> str:
    """Returns the layers of one depth of multi-token prediction; empty if the model has none."""
    if not config.get("num_nextn_predict_layers"):
        return ""
    return _pattern(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern", "*E")


def _read(config: HfConfig) -> ModelFacts:
    sizes, facts = sizes_of(config), facts_of(config)
    heads, groups = integer(config, "mamba_num_heads"), integer(config, "n_groups")
    sizes |= {"mamba_heads": heads, "inner": heads * integer(config, "mamba_head_dim")}
    sizes["states"] = groups * integer(config, "ssm_state_size")
    sizes["convolved"] = sizes["inner"] + 2 * sizes["states"]
    sizes["mixed"] = sizes["inner"] + sizes["convolved"] + heads
    decoder, depth = _decoder(config), _depth(config)
    if "E" in decoder + depth:
        sizes |= {"experts": integer(config, "n_routed_experts"), "moe_ffn": integer(config, "moe_intermediate_size")}
        sizes["shared_ffn"] = integer(config, "moe_shared_expert_intermediate_size")
        sizes["latent"] = sizes["hidden"]
        if config.get("moe_latent_size") is not None:
            sizes["latent"] = integer(config, "moe_latent_size")
            facts.add("latent")
    layers = tuple(frozenset({_KINDS[symbol]}) for symbol in decoder)
    mtp_layers = tuple(frozenset({_KINDS[symbol]}) for symbol in depth) * (config.get("num_nextn_predict_layers") or 0)
    return ModelFacts(sizes, frozenset(facts), layers, mtp_layers, mtp_stack=len(depth) or 1)


_MODEL = (
    Row(MCORE_EMBEDDING, {"backbone.embeddings.weight": "vocab hidden"}),
    Row("decoder.final_norm.weight", {"backbone.norm_f.weight": "hidden"}),
    Row(MCORE_HEAD, {"lm_head.weight": "vocab hidden"}, when="!tied"),
)
_NORMS = (
    Row("norm.weight", {"norm.weight": "hidden"}, when="mamba"),
    Row("input_layernorm.weight", {"norm.weight": "hidden"}, when="attention"),
    Row("pre_mlp_layernorm.weight", {"norm.weight": "hidden"}, when="!mamba !attention"),
)
_CONVOLVED = {"x": "inner", "B": "states", "C": "states"}
_MAMBA = (
    Row(
        "mixer.in_proj.weight",
        {"mixer.in_proj.weight": "mixed hidden"},
        when="mamba",
        sections={"z": "inner", **_CONVOLVED, "dt": "mamba_heads"},
    ),
    Row("mixer.conv1d.weight", {"mixer.conv1d.weight": "convolved 1 4"}, when="mamba", sections=_CONVOLVED),
    Row("mixer.conv1d.bias", {"mixer.conv1d.bias": "convolved"}, when="mamba", sections=_CONVOLVED),
    *(Row(f"mixer.{name}", {f"mixer.{name}": "mamba_heads"}, when="mamba") for name in ("A_log", "D", "dt_bias")),
    Row("mixer.norm.weight", {"mixer.norm.weight": "inner"}, when="mamba"),
    Row("mixer.out_proj.weight", {"mixer.out_proj.weight": "hidden inner"}, when="mamba"),
)
_ATTENTION = attention("mixer", when="attention")
_MLP = (
    Row("mlp.linear_fc1.weight", {"mixer.up_proj.weight": "ffn hidden"}, when="mlp"),
    Row("mlp.linear_fc2.weight", {"mixer.down_proj.weight": "hidden ffn"}, when="mlp"),
)
_SHARED = "mlp.shared_experts."
_MOE = (
    Row("mlp.router.weight", {"mixer.gate.weight": "experts hidden"}, when="moe"),
    Row("mlp.router.expert_bias", {"mixer.gate.e_score_correction_bias": "experts"}, when="moe"),
    Row(EXPERT + "linear_fc1.weight", {"mixer.experts.{expert}.up_proj.weight": "moe_ffn latent"}, when="moe"),
    Row(EXPERT + "linear_fc2.weight", {"mixer.experts.{expert}.down_proj.weight": "latent moe_ffn"}, when="moe"),
    Row(_SHARED + "linear_fc1.weight", {"mixer.shared_experts.up_proj.weight": "shared_ffn hidden"}, when="moe"),
    Row(_SHARED + "linear_fc2.weight", {"mixer.shared_experts.down_proj.weight": "hidden shared_ffn"}, when="moe"),
    # In Nemotron-3, the input of routed experts is a projection of the hidden state.
    Row("mlp.fc1_latent_proj.weight", {"mixer.fc1_latent_proj.weight": "latent hidden"}, when="moe latent"),
    Row("mlp.fc2_latent_proj.weight", {"mixer.fc2_latent_proj.weight": "hidden latent"}, when="moe latent"),
)
_STACKED = (
    Row(EXPERT + "linear_fc1.weight", {"mixer.experts.up_proj": "experts moe_ffn latent"}, when="moe"),
    Row(EXPERT + "linear_fc2.weight", {"mixer.experts.down_proj": "experts latent moe_ffn"}, when="moe"),
)
_MTP = (
    Row("enorm.weight", {"enorm.weight": "hidden"}, when="first"),
    Row("hnorm.weight", {"hnorm.weight": "hidden"}, when="first"),
    Row("eh_proj.weight", {"eh_proj.weight": "hidden 2*hidden"}, when="first"),
    Row("final_layernorm.weight", {"final_layernorm.weight": "hidden"}, when="last"),
)


class _Layers:
    """The rule for the kinds of layers, which megatron has as `hybrid_layer_pattern`."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        decoder, depths = _decoder(hf), hf.get("num_nextn_predict_layers") or 0
        return {
            "num_layers": len(decoder),
            "mtp_num_layers": depths or None,
            "is_hybrid_model": True,
            "gpt.hybrid_layer_pattern": "/".join((decoder, *(_depth(hf) for _ in range(depths)))),
        }

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        decoder, *depths = mcore["gpt.hybrid_layer_pattern"].split("/")
        fields: HfFields = {"num_nextn_predict_layers": len(depths)}
        texts = {"layers_block_type": (decoder, "hybrid_override_pattern")}
        if depths:
            texts["mtp_layers_block_type"] = depths[0], "mtp_hybrid_override_pattern"
        for names, (pattern, symbols) in texts.items():
            fields[names] = [_NAMES[symbol] for symbol in pattern]
            fields |= {symbols: pattern} if symbols in base else {}
        return fields | ({"num_hidden_layers": len(decoder)} if "num_hidden_layers" in base else {})


class _TimeSteps(Rule):
    """The rule that refuses a limit of Mamba's time steps, because megatron's MambaMixer has no limit (0.18, 0.19)."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        least, most = hf.get("time_step_limit") or (0.0, inf)
        # transformers 5 writes infinity as an object.
        if least or most not in (inf, {"__float__": "Infinity"}):
            raise UnsupportedError(
                f"config.json: time_step_limit is {[least, most]}, but megatron-core 0.19 has no such limit: only "
                "[0.0, Infinity] can be converted"
            )
        return {}


@dataclass(frozen=True)
class _IfExperts:
    """Rules that apply only if there are experts. A `config.json` has sizes of experts even if no layer has experts."""

    rules: tuple[Rule, ...]

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        if "E" not in _decoder(hf) + _depth(hf):
            return {"num_moe_experts": None}
        return {name: value for rule in self.rules for name, value in rule.to_mcore(hf).items()}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        if mcore["num_moe_experts"] is None:
            return {}
        return {name: value for rule in self.rules for name, value in rule.to_hf(mcore, base).items()}


ARCHITECTURES = (
    Architecture(
        "nemotron_h",
        ("NemotronHForCausalLM",),
        Table(
            _MODEL,
            (*_NORMS, *_MAMBA, *_ATTENTION, *_MLP, *_MOE),
            mtp=_MTP,
            stacked=_STACKED,
            hf="backbone.",
            hf_mtp_layer="mtp.layers.{mtp}.",
            is_hybrid=True,
            gated=False,
        ),
        _read,
        (
            _Layers(),
            Same("hidden_size", "hidden_size"),
            Same("num_attention_heads", "num_attention_heads"),
            QueryGroups(),
            HeadDim(),
            Same("ffn_hidden_size", "intermediate_size"),
            # The norm in MambaMixer always has this epsilon (0.18, 0.19).
            Refused("layer_norm_epsilon", 1e-5),
            Same("layernorm_epsilon", "layer_norm_epsilon"),
            Same("attention_dropout", "attention_dropout", default=0.0),
            Same("hidden_dropout", "hidden_dropout", default=0.0),
            Same("fp32_residual_connection", "residual_in_fp32", default=False),
            Constant("normalization", "RMSNorm"),
            Dtype(),
            Same("gpt.vocab_size", "vocab_size"),
            Same("gpt.max_sequence_length", "max_position_embeddings"),
            Same("gpt.share_embeddings_and_output_weights", "tie_word_embeddings", default=False),
            # The attention of these models has no rotary embeddings, because Mamba knows the order of tokens.
            Constant("gpt.position_embedding_type", "none"),
            SquaredRelu(),
            Constant("add_bias_linear", False),
            Same("mamba_state_dim", "ssm_state_size"),
            Same("mamba_head_dim", "mamba_head_dim"),
            Same("mamba_num_groups", "n_groups"),
            Same("mamba_num_heads", "mamba_num_heads"),
            *(Refused(name, False) for name in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias")),
            Refused("use_conv_bias", True),
            Refused("mamba_hidden_act", "silu"),
            # HybridStack builds each MambaMixer with d_conv = 4 (0.18, 0.19).
            Refused("conv_kernel", 4),
            _TimeSteps(),
            Refused("sliding_window", None),
            _IfExperts(
                (
                    Same("num_moe_experts", "n_routed_experts"),
                    Same("moe_router_topk", "num_experts_per_tok"),
                    Same("moe_ffn_hidden_size", "moe_intermediate_size"),
                    Same("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
                    Same("moe_latent_size", "moe_latent_size", default=None),
                    SigmoidScores(),
                )
            ),
        ),
    ),
)
