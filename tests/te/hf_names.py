"""Transformer-engine models of all HuggingFace architectures have the tensors that the tables name. A job of
te_server.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel

from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from mcore_ckpt.models import HfModel, check_model, model_from_config, to_mcore_config
from mcore_ckpt.models.mapping import hf_tensors
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.sharding.towers import in_tower
from mcore_ckpt.state.model import model_shards
from tests.support.tiny_models import make_config
from tests.te.te_on_cpu import cuda_seems_available, do_without_fla


def main(_: Path, names: Sequence[str]) -> None:
    # Made before CUDA seems to be there: transformers asks, too.
    models = {name: model_from_config(make_config(name)) for name in names}
    enable_cpu()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    do_without_fla()
    for name, model in models.items():
        check(name, model)


def check(name: str, hf_model: HfModel) -> None:
    model = build(hf_model)
    check_model(model, hf_model)
    there = {shard.key.name: shard.region for shard in model_shards([model]) if shard.key.kind == MODEL}
    named = {slab.mcore: slab.region for tensor in hf_tensors(hf_model) for slab in tensor.slabs if slab.mcore}
    # Of a vision-language model, this is the language model alone.
    named = {name: region for name, region in named.items() if not in_tower(name)}
    found = {mcore: found_as(mcore, there) for mcore in named}
    missing = [mcore for mcore, synonym in found.items() if synonym is None]
    assert not missing, f"{name}: not in the model: {missing}"
    assert len(set(found.values())) == len(found), f"{name}: two names for one tensor"
    # Without latent queries megatron 0.19 fuses a norm with `linear_q_proj`, which no HuggingFace model has. A load of
    # such a model is refused.
    norm = re.compile(r".*\.self_attention\.linear_q_proj\.layer_norm_weight")
    unnamed = sorted(name for name in there.keys() - set(found.values()) if not norm.fullmatch(name))
    assert not unnamed, f"{name}: no row of the table has {unnamed}"
    for mcore, synonym in found.items():
        shape = there[str(synonym)].global_shape
        assert shape == named[mcore].global_shape, f"{name}: {mcore} is {named[mcore].global_shape}, {synonym} {shape}"


def build(hf_model: HfModel, vocab_divisor: int = 1, **sizes: int) -> Any:
    """The model that a config describes, from transformer-engine's layer specs.

    Args:
        vocab_divisor: what the vocabulary is padded to a multiple of.
        sizes: of the layout, as TransformerConfig calls them.
    """
    known = to_mcore_config(hf_model)
    rows = -(-known.gpt["vocab_size"] // vocab_divisor) * vocab_divisor
    config = known.transformer_config(
        use_cpu_initialization=True,
        transformer_impl="transformer_engine",
        moe_grouped_gemm=bool(known.transformer.get("num_moe_experts")),
        **sizes,
    )
    with cuda_seems_available():
        if hf_model.architecture.table.is_hybrid:
            # Since 0.18.
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
            from megatron.core.models.hybrid.hybrid_model import HybridModel

            return HybridModel(config, hybrid_stack_spec, **{**known.gpt, "vocab_size": rows})
        if config.experimental_attention_variant:
            spec = get_transformer_block_with_experimental_attention_variant_spec(config)
        else:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm")
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True) if config.mtp_num_layers else None
        return GPTModel(config, spec, mtp_block_spec=mtp, **{**known.gpt, "vocab_size": rows})
