"""The models of these tests in transformers' words."""

from dataclasses import replace
from typing import Any

from transformers import LlamaConfig, Qwen3MoeConfig

from mcore_ckpt.models import Architecture, known_architectures, register_architecture
from tests.distributed.training import SEQUENCE_LENGTH, VOCAB_SIZE, Layout


class MixtureConfig(Qwen3MoeConfig):
    """The mixtures of these tests: every second layer, no norms of queries and keys, unlike any published model."""

    model_type = "tests_mixture"


def _register_mixture() -> None:
    like = known_architectures()["qwen3_moe"]
    layer = tuple(row for row in like.table.layer if "q_norm" not in str(row.hf) and "k_norm" not in str(row.hf))
    table = replace(like.table, layer=layer)
    rules = tuple(rule for rule in like.rules if getattr(rule, "mcore", "") != "qk_layernorm")
    register_architecture(Architecture("tests_mixture", like.classes, table, like.read, rules))


_register_mixture()


def hf_config(layout: Layout) -> Any:
    """What the model of a layout is, in transformers' words."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": layout.hidden_size,
        "intermediate_size": 2 * layout.hidden_size,
        "num_hidden_layers": layout.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": layout.hidden_size // 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": SEQUENCE_LENGTH,
        "tie_word_embeddings": layout.tied_embeddings,
    }
    if layout.experts is None:
        return LlamaConfig(**common, attention_bias=False)
    mixture = {
        "num_experts": layout.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": layout.hidden_size // 2,
    }
    return MixtureConfig(**common, **mixture, decoder_sparse_step=2, norm_topk_prob=True)
