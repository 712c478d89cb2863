"""Megatron's HybridModel (0.18 and newer) with local layers; megatron has specs of transformer-engine's layers only.

Real: HybridModel, its layers and mixers. Stood in for: the kernels of mamba_ssm (tests/support/stand_ins) and one
function of flash-linear-attention.
"""

import sys
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from tests.support.parity import l2norm

# What a TransformerConfig needs for Mamba layers and gated delta nets.
MIXERS: dict[str, Any] = {
    "mamba_state_dim": 8,
    "mamba_head_dim": 20,
    "mamba_num_groups": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Otherwise a gated delta net runs kernels that need a GPU.
    "deterministic_mode": True,
}


def build_hybrid(config: TransformerConfig, norm: type, pattern: str, **arguments: Any) -> HybridModel:
    """A chunk of the model that `hybrid_layer_pattern` describes."""
    # HybridStack takes this norm for its last one, whatever the spec says.
    hybrid_block.TENorm = norm
    # Since 0.19 the module is a package, and its part `common` uses these names.
    using: Any = sys.modules[gated_delta_net.GatedDeltaNetSubmodules.__module__]
    using.HAVE_FLA, using.l2norm = True, l2norm
    return HybridModel(config, _stack(config, norm), hybrid_layer_pattern=pattern, **arguments)


def _stack(config: TransformerConfig, norm: type) -> ModuleSpec:
    attention = SelfAttentionSubmodules(ColumnParallelLinear, DotProductAttention, RowParallelLinear)
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    delta_net = gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, norm, RowParallelLinear)
    layers = {
        "attention_layer": _attention(
            norm, ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention)
        ),
        "gdn_layer": _attention(norm, ModuleSpec(gated_delta_net.GatedDeltaNet, submodules=delta_net)),
        "mtp_block_spec": mtp_block(norm),
        "mlp_layer": ModuleSpec(
            MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
        "mamba_layer": ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=norm, mixer=ModuleSpec(MambaMixer, submodules=mixer), mamba_bda=get_bias_dropout_add
            ),
        ),
    }
    if config.num_moe_experts:
        layers["moe_layer"] = ModuleSpec(
            MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False),
                mlp_bda=get_bias_dropout_add,
            ),
        )
    return ModuleSpec(hybrid_block.HybridStack, submodules=hybrid_block.HybridStackSubmodules(**layers))


def _attention(norm: type, self_attention: ModuleSpec) -> ModuleSpec:
    parts = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=self_attention, self_attn_bda=get_bias_dropout_add
    )
    return ModuleSpec(TransformerLayer, submodules=parts)


def mtp_block(norm: type) -> ModuleSpec:
    """Its layers are built from the pattern after the slash."""
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=norm
    )
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[ModuleSpec(MultiTokenPredictionLayer, submodules=layer)])
    return ModuleSpec(MultiTokenPredictionBlock, submodules=block)
