"""HybridModels (megatron 0.18 and newer) of the same parts as the GPTModel that a HuggingFace folder describes."""

import copy
from itertools import pairwise
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from tests.distributed.hybrid_model import mtp_block

_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")
# By the symbol in the pattern, the field of HybridStackSubmodules and the class of layer.
_KINDS = {
    "*": ("attention_layer", TransformerLayer, _ATTENTION),
    "G": ("gdn_layer", TransformerLayer, _ATTENTION),
    "-": ("mlp_layer", MLPLayer, _MLP),
    "E": ("moe_layer", MoETransformerLayer, _MLP),
}


def hybrid_chunk(config: Any, block: Any, norm: type, gpt: dict[str, Any], **where: Any) -> HybridModel:
    """A chunk of the HybridModel.

    Args:
        config: of the GPTModel.
        block: the specs of all layers of the GPTModel, with local layers.
        norm: the class of all norms.
        gpt: arguments of GPTModel.
        where: `vp_stage`, and whether this is the first and the last stage.
    """
    symbols = _symbols(config)
    layers = {_KINDS[symbol][0]: _part(block.layer_specs[number // 2], symbol) for number, symbol in enumerate(symbols)}
    hybrid_block.TENorm = norm
    stack = hybrid_block.HybridStackSubmodules(**layers, mtp_block_spec=mtp_block(norm))
    mtp = f"/{symbols[-2:]}" * (config.mtp_num_layers or 0)
    return HybridModel(
        _hybrid_config(config, len(symbols)),
        ModuleSpec(hybrid_block.HybridStack, submodules=stack),
        hybrid_layer_pattern="|".join(_segments(symbols, config)) + mtp,
        **{name: value for name, value in gpt.items() if name != "rope_scaling"},
        **where,
    )


def _symbols(config: Any) -> str:
    layers = range(config.num_layers)
    linear = config.linear_attention_freq if config.experimental_attention_variant else [0 for _ in layers]
    experts = config.moe_layer_freq if config.num_moe_experts else 0
    experts = experts if isinstance(experts, list) else [experts for _ in layers]
    return "".join("*G"[linear[layer]] + "-E"[experts[layer]] for layer in layers)


def _segments(symbols: str, config: Any) -> list[str]:
    """One more layer in the first segment, so that stages end within the GPTModel's layers."""
    count = parallel_state.get_pipeline_model_parallel_world_size() * (config.virtual_pipeline_model_parallel_size or 1)
    size = len(symbols) // count
    ends = [0, *(size * number + 1 for number in range(1, count)), len(symbols)]
    return [symbols[start:end] for start, end in pairwise(ends)]


def _part(layer: ModuleSpec, symbol: str) -> ModuleSpec:
    _, kind, names = _KINDS[symbol]
    return ModuleSpec(
        kind, submodules=TransformerLayerSubmodules(**{name: getattr(layer.submodules, name) for name in names})
    )


def _hybrid_config(config: Any, depth: int) -> Any:
    hybrid = copy.copy(config)
    hybrid.num_layers, hybrid.is_hybrid_model = depth, True
    hybrid.experimental_attention_variant = hybrid.linear_attention_freq = None
    hybrid.moe_layer_freq, hybrid.num_layers_in_first_pipeline_stage = 1, None
    if isinstance(config.window_attn_skip_freq, list):
        # One value for each layer of any kind; only attention asks for its own.
        hybrid.window_attn_skip_freq = [value for each in config.window_attn_skip_freq for value in (each, 0)]
    return hybrid
