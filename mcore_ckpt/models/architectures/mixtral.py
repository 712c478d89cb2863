"""Mixtral: every layer is a mixture of experts."""

from __future__ import annotations

from mcore_ckpt.models.architecture import Architecture
from mcore_ckpt.models.architectures.common import ATTENTION, EXPERT, MODEL, NORMS, STACKED_EXPERTS, read_mixture
from mcore_ckpt.models.config_fields import Constant, Same
from mcore_ckpt.models.config_rules import DENSE, EXPERT_COUNT, SlidingWindow
from mcore_ckpt.models.rope_rules import Rope
from mcore_ckpt.models.table import Row, Table

BLOCK_SPARSE_EXPERTS = (
    Row("mlp.router.weight", {"block_sparse_moe.gate.weight": "experts hidden"}),
    Row(
        EXPERT + "linear_fc1.weight",
        {
            "block_sparse_moe.experts.{expert}.w1.weight": "moe_ffn hidden",
            "block_sparse_moe.experts.{expert}.w3.weight": "moe_ffn hidden",
        },
    ),
    Row(EXPERT + "linear_fc2.weight", {"block_sparse_moe.experts.{expert}.w2.weight": "hidden moe_ffn"}),
)
BLOCK_SPARSE_STACKED = (*STACKED_EXPERTS, Row("mlp.router.weight", {"mlp.gate.weight": "experts hidden"}))

ARCHITECTURES = (
    Architecture(
        "mixtral",
        ("MixtralForCausalLM", "MixtralForTokenClassification"),
        Table(MODEL, (*NORMS, *ATTENTION, *BLOCK_SPARSE_EXPERTS), stacked=BLOCK_SPARSE_STACKED),
        read_mixture,
        (
            *DENSE,
            Rope(default_theta=1e6),
            SlidingWindow(),
            *EXPERT_COUNT,
            Same("moe_ffn_hidden_size", "intermediate_size"),
            # The weights of the chosen experts always add up to 1, because the softmax is over these experts only.
            Constant("moe_router_pre_softmax", False),
        ),
    ),
)
