"""verl's real MegatronEngine on a machine without CUDA: what cannot be had there is mapped here and nowhere else.

The engine, its registry, optimizer, schedule, offloading and mbridge (the bridge of `vanilla_mbridge=True`) are verl's
and megatron's own (seen with verl 0.9.1 and mbridge 0.15.1). Mapped are the device, for megatron as in the demo, and
transformer-engine, which mbridge's models are made of.
"""

import gc
from dataclasses import fields
from typing import Any

import numpy
import torch
from mbridge.core import llm_bridge
from mbridge.models import Qwen2Bridge
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from verl.utils import device
from verl.workers.config import McoreEngineConfig

from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu


def engine_options(engine: str) -> list[str]:
    """What the engine is told in verl's own words.

    Args:
        engine: where its options are in the configuration: "engine" of SFT, "critic.megatron" and the like of PPO.
    """
    transformer = f"{engine}.override_transformer_config"
    # 0.6 has no bridge but mbridge, which it leaves out by default, and no choice for packed sequences, which are for
    # transformer-engine's attention alone.
    choices = {"use_mbridge": True, "vanilla_mbridge": True, "use_remove_padding": False}
    known = {field.name for field in fields(McoreEngineConfig)}
    return [
        *(f"++{engine}.{name}={choice}" for name, choice in choices.items() if name in known),
        f"{transformer}.attention_backend=local",
        f"++{transformer}.use_cpu_initialization=True",
        # torch's norm, in the place of transformer-engine's, does not know it.
        f"++{transformer}.sequence_parallel=False",
        f"++{transformer}.gradient_accumulation_fusion=False",
        f"++{transformer}.bias_dropout_fusion=False",
        f"++{transformer}.bias_activation_fusion=False",
        f"++{transformer}.masked_softmax_fusion=False",
        f"++{transformer}.apply_rope_fusion=False",
        # So that a resumed run that lacks its random states is another run.
        f"++{transformer}.hidden_dropout=0.1",
    ]


class CausalAttention(DotProductAttention):
    """verl masks the padding at the end (`preprocess_bshd_engine`) by a mask of transformer-engine's form.

    The workers of 0.6 and 0.7 pack sequences into one. Here each of them sees those before it, too.
    """

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.pop("packed_seq_params", None) is not None:
            query, key, value = (each.unsqueeze(1) for each in (query, key, value))
        # Behind what it attends to: padding changes nothing but itself.
        return super().forward(query, key, value, None, *args, **kwargs)


def enable() -> None:
    """For the rest of the process, on the thread that trains. Before the first engine is made."""
    # verl collects garbage whenever it offloads, and would look through all that was imported: seconds of each run.
    gc.freeze()
    enable_cpu()
    _map_device()
    # As it was called before numpy 2, which megatron-core 0.15 cannot save its optimizer with.
    numpy.product = numpy.prod
    llm_bridge.get_gpt_decoder_block_spec = _block_spec
    # transformer-engine has each norm in the linear layer behind it.
    layer = "model.layers.{layer_number}"
    Qwen2Bridge._OTHER_MAPPING = {"input_layernorm.weight": [f"{layer}.input_layernorm.weight"]}
    Qwen2Bridge._MLP_MAPPING |= {"pre_mlp_layernorm.weight": [f"{layer}.post_attention_layernorm.weight"]}


def _map_device() -> None:
    """What verl asks of the device beyond what megatron does."""
    device.is_cuda_available = True  # until 0.8 it is asked once, when verl is imported
    # A copy, as on a GPU: verl frees the memory behind the tensor.
    torch.Tensor.pin_memory = lambda tensor, *device: tensor.clone()
    torch.cuda.device_count = lambda: 1  # set_random_seed seeds megatron's generators only where there is one
    torch.cuda.get_device_name = lambda *device: "CPU"  # the key of its table of FLOPS
    torch.cuda.mem_get_info = lambda *device: (0, 0)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *device: 0)


def _block_spec(config: TransformerConfig, use_transformer_engine: bool, **where: Any) -> TransformerBlockSubmodules:
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, **where)
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = ModuleSpec(module=CausalAttention)
    return block
