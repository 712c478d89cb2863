"""Live megatron models of the shape that a HuggingFace folder's config says, and what they must hold after a load."""

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open

from mcore_ckpt.models.architecture import HfModel, read_config
from mcore_ckpt.models.mcore_config import McoreConfig, to_mcore_config
from mcore_ckpt.models.reconcile import with_tower_of
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.sharding.synonyms import synonyms
from mcore_ckpt.state.model import model_shards, unwrap
from tests.distributed.training import Layout, RMSNorm
from tests.support.element_positions import positions
from tests.support.global_tensors import to_mcore
from tests.support.parity import (
    ValueHead,
    ZeroCentredNorm,
    block_spec,
    has_norms_of_all_heads,
    make_latent,
    make_linear,
    make_norms_of_all_heads,
    make_sparse,
    mtp_spec,
    with_tower,
)

Model = list[torch.nn.Module]


@dataclass(frozen=True)
class Shape:
    """How a folder's model is cut, beside what its config says."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    """None: as tp."""
    first_stage_layers: int | None = None
    dtype: torch.dtype = torch.float32
    hybrid: bool = False
    """A HybridModel of the same parts, instead of a GPTModel."""
    tower: str | None = None
    """Of whose modules a vision tower is: "transformers" or "megatron". None: as Megatron-Bridge has it."""

    @property
    def layout(self) -> Layout:
        """What `training.parallel` asks for."""
        return Layout(self.world, tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=self.etp)


def build_model(folder: Path, shape: Shape, **changes: Any) -> Model:
    """New chunks with NaN in every parameter and floating buffer, so that nothing that is not filled can hide.

    `changes` are made to the config that is built for, not to the folder's.
    """
    hf = {**read_config(folder), **changes}
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    hf_model = model_from_config(hf)
    wanted = to_mcore_config(hf_model)
    config = _config(wanted, shape)
    chunks: Model = [_chunk(hf_model, wanted, config, shape, stage) for stage in range(shape.vpp or 1)]
    if hf_model.is_value and chunks[-1].post_process:
        chunks[-1].output_layer = ValueHead(config.hidden_size)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    chunks = [with_tower(hf_model, config, chunk, shape.tower).to(device, shape.dtype).eval() for chunk in chunks]
    poison(chunks)
    return chunks


def wrap(chunks: Model) -> Model:
    """In DistributedDataParallel, which moves the parameters into its buffers."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return [
        DistributedDataParallel(unwrap(chunk).config, ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def poison(chunks: Sequence[torch.nn.Module]) -> None:
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(math.nan)
            for name, buffer in chunk.named_buffers():
                if name.endswith("expert_bias"):
                    buffer.fill_(math.nan)


def _config(wanted: McoreConfig, shape: Shape) -> TransformerConfig:
    mixture: dict[str, Any] = {}
    if wanted.transformer.get("num_moe_experts"):
        mixture = {"moe_token_dispatcher_type": "allgather"}
    variant = wanted.transformer.get("experimental_attention_variant")
    if variant == "gated_delta_net":
        # Else it asks for kernels that need a GPU.
        mixture["deterministic_mode"] = True
    if variant == "dsa":
        mixture["sequence_parallel"] = shape.tp > 1
    config: TransformerConfig = wanted.transformer_config(
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        virtual_pipeline_model_parallel_size=shape.vpp,
        overlap_p2p_comm=shape.vpp is not None,
        batch_p2p_comm=shape.vpp is None,
        expert_model_parallel_size=shape.ep,
        expert_tensor_parallel_size=shape.etp,
        num_layers_in_first_pipeline_stage=shape.first_stage_layers,
        params_dtype=shape.dtype,
        pipeline_dtype=shape.dtype,
        bf16=shape.dtype == torch.bfloat16,
        fp16=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        **mixture,
    )
    return config


def _chunk(hf_model: HfModel, wanted: McoreConfig, config: TransformerConfig, shape: Shape, stage: int) -> Any:
    where: dict[str, Any] = {"vp_stage": stage if shape.vpp else None}
    multiple = 1 if shape.tp == 1 else 4 * shape.tp
    rows = -(-wanted.gpt["vocab_size"] // multiple) * multiple
    gpt = {**wanted.gpt, "vocab_size": rows}
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, **where),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, **where),
    }
    if "hybrid_layer_pattern" in gpt:
        from tests.distributed.hybrid_model import build_hybrid

        pattern = _segmented(gpt.pop("hybrid_layer_pattern"), shape)
        return build_hybrid(config, RMSNorm, pattern, **gpt, **ends, **where).to(shape.dtype).eval()
    config_of_block = _on_one_stage(config) if shape.hybrid else config
    block = block_spec(config_of_block, **where)
    if config.experimental_attention_variant == "dsa":
        make_sparse(block)
    elif config.experimental_attention_variant:
        offset = 0 if shape.hybrid else get_transformer_layer_offset(config, **where)
        make_linear(config_of_block, block, offset)
        for layer, is_linear in zip(block.layer_specs, config.linear_attention_freq[offset:], strict=False):
            if is_linear:
                # As transformer-engine's spec has it, which is the only one for these layers.
                names = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
                layer.submodules.sharded_state_dict_keys_map |= names
    else:
        block.layer_norm = RMSNorm
        for layer in block.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if config.multi_latent_attention:
            make_latent(config, block)
        if has_norms_of_all_heads(hf_model):
            make_norms_of_all_heads(block)
    mtp = None
    if config.mtp_num_layers and not shape.hybrid:
        mtp = mtp_spec(config, block, **where)
    if shape.hybrid:
        from tests.distributed.hf_hybrid import hybrid_chunk

        norm = ZeroCentredNorm if config.experimental_attention_variant else RMSNorm
        model = hybrid_chunk(config, block, norm, gpt, **ends, **where)
    else:
        model = GPTModel(config, block, **gpt, mtp_block_spec=mtp, **ends, **where)
    return model.to(shape.dtype).eval()


def _segmented(pattern: str, shape: Shape) -> str:
    """A pattern with a segment for each virtual stage. Without these HybridModel divides the layers itself."""
    if shape.vpp is None:
        return pattern
    decoder, *depths = pattern.split("/")
    size = len(decoder) // (shape.pp * shape.vpp)
    return "/".join(("|".join(decoder[at : at + size] for at in range(0, len(decoder), size)), *depths))


def _on_one_stage(config: TransformerConfig) -> TransformerConfig:
    config = copy.copy(config)
    config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size = 1, None
    return config


# -- what must be there -----------------------------------------------------------------------------------


def global_tensors(folder: Path, hybrid: bool = False, tower: str | None = None) -> dict[str, torch.Tensor]:
    """megatron's global tensors, put together from the folder's tensors element by element, under GPTModel's names."""
    names = {"transformers": ["visual.merger"], "megatron": ["vision_model.decoder.layers"], None: []}[tower]
    tensors = to_mcore(with_tower_of(model_from_config(read_config(folder)), names), read_tensors(folder))
    return {_name_in_hybrid(name): tensor for name, tensor in tensors.items()} if hybrid else tensors


def _name_in_hybrid(name: str) -> str:
    """A GPTModel's layer 3 is the layers 6 (attention) and 7 (MLP) of the HybridModel."""
    match = re.fullmatch(r"(decoder\.layers\.|mtp\.layers\.\d+\.transformer_layer\.)(\d*)(\.?)(.+)", name)
    if match is None:
        return name
    stack, number, _, rest = match.groups()
    second = not rest.startswith(("input_layernorm.", "self_attention."))
    stack = stack.replace("transformer_layer.", "mtp_model_layer.layers.")
    return f"{stack}{2 * int(number or 0) + second}.{rest}"


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def assert_holds(chunks: Sequence[torch.nn.Module], wanted: dict[str, torch.Tensor]) -> None:
    """Every tensor of this rank is its part of the global one, bit for bit; what pads the vocabulary is zero."""
    for shard in model_shards(chunks):
        if shard.key.kind != MODEL:
            continue
        name = next(name for name in synonyms(shard.key.name) if name in wanted)
        whole = wanted[name].to(shard.tensor.dtype)
        padded = torch.zeros(shard.region.global_shape, dtype=whole.dtype)
        padded[: whole.shape[0]] = whole
        part = padded.view(-1)[positions(shard.region)].view(shard.tensor.shape)
        assert torch.equal(part, shard.tensor.detach().cpu()), shard.key.name


# -- logits -----------------------------------------------------------------------------------------------


def logits_of(chunks: Model, tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits of a batch of tokens, [batch, sequence, vocabulary with padding]; None but on the last stage.

    Tokens and logits are on the CPU, wherever the model is.
    """
    tokens = tokens.to(next(chunks[0].parameters()).device)

    def forward(batches: Iterator[torch.Tensor], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        places = torch.arange(batch.shape[1], device=batch.device).expand_as(batch)
        output = chunk(batch, places, None, runtime_gather_output=True)
        return output, lambda found, non_loss_data=False: found.detach().clone()

    # On a GPU, convolutions would compute in TF32.
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        # The schedule with virtual stages wants a multiple of the pipeline's size.
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter([part[None] for part in tokens]) for _ in chunks],
            model=chunks,
            num_microbatches=len(tokens),
            seq_length=tokens.shape[1],
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return torch.cat(found).cpu() if found else None


def sample_tokens(vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (4, 12), generator=torch.Generator().manual_seed(5))


def transformers_logits(folder: Path) -> torch.Tensor:
    """What transformers computes, in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if "vision_config" in read_config(folder) else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(sample_tokens(model.config.get_text_config().vocab_size)).logits
    return logits


def is_last_stage() -> bool:
    return dist.get_world_size() == 1 or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
