"""gpt-oss, which has biases in all linear layers, a learned offset in the softmax and a clamped GLU."""

from __future__ import annotations

import torch

from mcore_ckpt.models.architecture import Architecture
from mcore_ckpt.models.architectures.common import ATTENTION, EXPERT, MODEL, NORMS, read_mixture
from mcore_ckpt.models.config_fields import Constant, Refused, Same
from mcore_ckpt.models.config_rules import DECODER, EXPERT_COUNT, ClampedGlu, SlidingWindow
from mcore_ckpt.models.rope_rules import Rope
from mcore_ckpt.models.table import Row, Table


class Interleaved:
    """Converts gate and up of gpt-oss's experts, both weights and biases.

    HuggingFace interleaves the outputs of an expert: even outputs belong to the gate, odd outputs to `up`. mcore's fc1
    has all outputs of the gate first, then all outputs of `up`. In HuggingFace, the first axis of a weight has the
    inputs; in mcore it has the outputs.
    """

    def to_hf(self, mcore: torch.Tensor) -> torch.Tensor:
        half = mcore.shape[0] // 2
        return torch.stack((mcore[:half], mcore[half:]), dim=1).flatten(0, 1).movedim(0, -1).contiguous()

    def to_mcore(self, hf: torch.Tensor) -> torch.Tensor:
        outputs = hf.movedim(-1, 0)
        return torch.cat((outputs[0::2], outputs[1::2]))


class Transposed:
    """Transposes a weight, whose first axis has the inputs in HuggingFace, but the outputs in mcore."""

    def to_hf(self, mcore: torch.Tensor) -> torch.Tensor:
        return mcore.T.contiguous()

    def to_mcore(self, hf: torch.Tensor) -> torch.Tensor:
        return hf.T.contiguous()


_LAYER = (
    Row("self_attention.core_attention.softmax_offset", {"self_attn.sinks": "heads"}),
    Row("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": "hidden"}),
    Row("mlp.router.weight", {"mlp.router.weight": "experts hidden"}),
    Row("mlp.router.bias", {"mlp.router.bias": "experts"}),
    Row(EXPERT + "linear_fc1.weight", {"mlp.experts.gate_up_proj": "experts hidden 2*moe_ffn"}, change=Interleaved()),
    Row(EXPERT + "linear_fc1.bias", {"mlp.experts.gate_up_proj_bias": "experts 2*moe_ffn"}, change=Interleaved()),
    Row(EXPERT + "linear_fc2.weight", {"mlp.experts.down_proj": "experts moe_ffn hidden"}, change=Transposed()),
    Row(EXPERT + "linear_fc2.bias", {"mlp.experts.down_proj_bias": "experts hidden"}),
)

ARCHITECTURES = (
    Architecture(
        "gpt_oss",
        ("GptOssForCausalLM", "GptOssForTokenClassification"),
        Table(MODEL, (*NORMS, *ATTENTION, *_LAYER)),
        lambda config: read_mixture(config, "qkv_bias"),
        (
            *DECODER,
            Rope(default_theta=150000.0),
            SlidingWindow(),
            *EXPERT_COUNT,
            Same("moe_ffn_hidden_size", "intermediate_size"),
            Constant("moe_router_pre_softmax", False),
            # megatron's flag covers every linear layer, including the router (TopKRouter, 0.16.1).
            Constant("add_bias_linear", True),
            Refused("attention_bias", True),
            Constant("softmax_type", "learnable"),
            ClampedGlu(),
        ),
    ),
)
