"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention, in which an indexer chooses the tokens to attend to.

megatron-core has this attention as `experimental_attention_variant="dsa"`. megatron before 0.19 cannot be used, because
it would choose other tokens: its indexer rotates the last elements of each head, but these models rotate the first
elements.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture, ModelFacts
from mcore_ckpt.models.architectures.common import NORMS, integer
from mcore_ckpt.models.architectures.deepseek import (
    DEEPSEEK_MLP,
    DEEPSEEK_RULES,
    DEEPSEEK_TABLE,
    LATENT_ROWS,
    read_deepseek,
)
from mcore_ckpt.models.config_fields import Constant, HfConfig, HfFields, McoreValues, Refused, Same
from mcore_ckpt.models.table import Row

_FULL, _SHARED = "full", "shared"


def _indexers(layers: int, freq: int, offset: int) -> list[str]:
    """Returns, for each layer, "full" if it has an indexer, and else "shared" (`is_dsa_skip_topk_layer`, 0.19)."""
    return [_SHARED if max(layer + 1 - max(offset, 1), 0) % freq else _FULL for layer in range(layers)]


def _frequency(config: HfConfig) -> tuple[int, int]:
    """Returns megatron's frequency and offset of the layers with an indexer."""
    layers, pattern = integer(config, "num_hidden_layers"), config.get("index_topk_pattern")
    types = config.get("indexer_types") or (
        pattern and [{"F": _FULL, "S": _SHARED}.get(each, each) for each in pattern]
    )
    if not types:
        return max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    found = list(types)
    # Layers are counted from 0. Layer `offset` is the first layer without an indexer. The next layer with an indexer is
    # layer `offset + freq - 1`.
    offset = found.index(_SHARED) if _SHARED in found else layers
    freq = (found.index(_FULL, offset) if _FULL in found[offset:] else len(found)) - offset + 1
    if found == _indexers(layers, freq, offset):
        return (freq, offset) if freq > 1 else (1, 1)
    raise UnsupportedError(
        f"config.json: indexer_types is {types}, but megatron-core 0.19 has no counterpart for these: after the first "
        "layers, exactly every n-th layer must have an indexer"
    )


def _read(config: HfConfig) -> ModelFacts:
    known = read_deepseek(config)
    heads, size = integer(config, "index_n_heads"), integer(config, "index_head_dim")
    sizes = {**known.sizes, "index_dim": size, "index_queries": heads * size, "index_heads": heads}
    if "q_lora" not in known.facts:
        raise UnsupportedError(
            "config.json: q_lora_rank is missing, but the indexer computes its queries from latent queries of this rank"
        )
    indexers = _indexers(len(known.layers), *_frequency(config)) if config["model_type"] == "glm_moe_dsa" else None
    layers = tuple(
        kind | {"indexer"} if indexers is None or indexers[number] == _FULL else kind
        for number, kind in enumerate(known.layers)
    )
    mtp_layers = tuple(kind | {"indexer"} for kind in known.mtp_layers)
    return replace(known, sizes=sizes, layers=layers, mtp_layers=mtp_layers)


_MCORE, _HF = "self_attention.core_attention.indexer.", "self_attn.indexer."
_INDEXER = (
    Row(f"{_MCORE}linear_wq_b.weight", {f"{_HF}wq_b.weight": "index_queries q_rank"}, when="indexer"),
    Row(f"{_MCORE}linear_wk.weight", {f"{_HF}wk.weight": "index_dim hidden"}, when="indexer"),
    Row(f"{_MCORE}k_norm.weight", {f"{_HF}k_norm.weight": "index_dim"}, when="indexer"),
    Row(f"{_MCORE}k_norm.bias", {f"{_HF}k_norm.bias": "index_dim"}, when="indexer"),
    Row(f"{_MCORE}linear_weights_proj.weight", {f"{_HF}weights_proj.weight": "index_heads hidden"}, when="indexer"),
)
_TABLE = replace(DEEPSEEK_TABLE, layer=(*NORMS, *LATENT_ROWS, *_INDEXER, *DEEPSEEK_MLP))


class _LayerTypes:
    """The rule for the lists in configs of transformers 5 that repeat the information of other fields."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        layers, dense = integer(hf, "num_hidden_layers"), hf.get("first_k_dense_replace") or 0
        for name, wanted in self._lists(layers, dense, hf).items():
            Refused(name, wanted).to_mcore(hf)
        return {}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        lists = self._lists(mcore["num_layers"], base.get("first_k_dense_replace") or 0, base)
        return {name: value for name, value in lists.items() if name in base}

    def _lists(self, layers: int, dense: int, base: HfConfig) -> HfFields:
        dense = min(dense, layers)
        mlps = ["dense"] * dense + ["sparse"] * (layers - dense)
        # transformers 5.17 writes the older word, and 5.23 writes the newer word.
        older, newer = "deepseek_sparse_attention", "indexed_attention"
        word = older if base.get("layer_types") == [older] * layers else newer
        return {"mlp_layer_types": mlps, "layer_types": [word] * layers}


class _SharedIndexers:
    """The rule for layers of GLM-5 that have no indexer, but attend to the tokens that an earlier layer has chosen."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        freq, offset = _frequency(hf)
        return {"dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset if freq > 1 else 0}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        freq, offset = mcore["dsa_indexer_topk_freq"], mcore["dsa_indexer_skip_topk_offset"]
        stated: HfFields = {"index_topk_freq": freq, "index_skip_topk_offset": offset}
        return stated | {"indexer_types": _indexers(mcore["num_layers"], freq, offset)}


_RULES = (
    *DEEPSEEK_RULES,
    _LayerTypes(),
    Refused("mlp_bias", False),
    Constant("experimental_attention_variant", "dsa"),
    Same("dsa_indexer_n_heads", "index_n_heads"),
    Same("dsa_indexer_head_dim", "index_head_dim"),
    Same("dsa_indexer_topk", "index_topk"),
    # transformers has the same two values (DeepseekV32Indexer): it does not rotate queries and keys, because a rotation
    # would change none of their products.
    Constant("dsa_indexer_k_norm_epsilon", 1e-6),
    Constant("dsa_indexer_rotate_activation", False),
)

ARCHITECTURES = (
    Architecture(
        "deepseek_v32",
        ("DeepseekV32ForCausalLM",),
        _TABLE,
        _read,
        (*_RULES, Constant("dsa_indexer_rope_interleaved", False)),
    ),
    Architecture(
        "glm_moe_dsa",
        ("GlmMoeDsaForCausalLM",),
        _TABLE,
        _read,
        (
            *_RULES,
            Constant("dsa_indexer_rope_interleaved", True),
            Refused("indexer_rope_interleave", True),
            _SharedIndexers(),
        ),
    ),
)
