"""Logits of HuggingFace models and of the GPTModels they become. Started by test_parity.py in a process of its own: the
stand-ins for CUDA must not reach other tests.

    python parity.py <folder> <name> ...     writes {name: largest difference} to <folder>/differences.json
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from global_tensors import to_mcore
from safetensors.torch import load_file
from tiny_models import VOCAB, make_hf_folder, make_hf_model, read_config

from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mcore_config import check_model, to_mcore_config
from mcore_ckpt.models.registry import model_from_config

PADDED_VOCAB = 136
TOKENS = 24


def main(root: Path, names: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel

    references = {name: reference(root / name, name) for name in names}
    enable_cpu()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    differences = {name: difference(root / name, wanted) for name, wanted in references.items()}
    (root / "differences.json").write_text(json.dumps(differences))
    torch.distributed.destroy_process_group()


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))


def reference(folder: Path, name: str) -> torch.Tensor:
    make_hf_folder(folder, name)
    with torch.no_grad():
        logits: torch.Tensor = make_hf_model(name)(input_ids=tokens()).logits
    return logits


def difference(folder: Path, wanted: torch.Tensor) -> float:
    hf_model = model_from_config(read_config(folder))
    model = build(hf_model)
    check_model(model, hf_model)
    load(model, to_mcore(hf_model, load_file(folder / "model.safetensors")))
    # GPTModel.forward (0.16.1) wants labels where there is multi-token prediction, and then gives no logits.
    model.mtp_process, model.config.mtp_num_layers = False, None
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1).expand(2, 1, TOKENS, TOKENS)
    with torch.no_grad():
        logits = model(tokens(), positions, mask)
    # NaN must not compare as small.
    return float((logits[..., : wanted.shape[-1]] - wanted).abs().max().nan_to_num(nan=1e9))


def build(hf_model: HfModel) -> Any:
    """The GPTModel that a config describes, all its parameters NaN."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    known = to_mcore_config(hf_model)
    config = known.transformer_config(
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        moe_token_dispatcher_type="allgather",
        bias_dropout_fusion=False,
        deterministic_mode=True,
    )
    spec = block_spec(config)
    if config.multi_latent_attention:
        make_latent(config, spec)
    if config.experimental_attention_variant:
        make_linear(config, spec)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    model = GPTModel(config, spec, mtp_block_spec=mtp, **{**known.gpt, "vocab_size": PADDED_VOCAB}).eval()
    if hf_model.is_value:
        model.output_layer = ValueHead(config.hidden_size)
    for tensor in [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if "expert_bias" in name)]:
        tensor.data.fill_(float("nan"))
    return model


class ValueHead(torch.nn.Linear):
    """As verl's critics have it in the place of `output_layer`."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(hidden_states), None


def make_latent(config: Any, spec: Any) -> None:
    """Multi-latent attention with local layers, in a stage's spec, which is changed.

    MLASelfAttention (0.16.1) hands the local attention arguments that only transformer-engine's takes. Where there are
    no latent queries, 0.19 wants a norm of queries fused with `linear_q_proj`, which no HuggingFace model has.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.identity_op import IdentityOp

    # It takes transformer-engine for installed because megatron's own module of wrappers can be imported without it.
    multi_latent_attention.HAVE_TE = False

    class Latent(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any):
            super().__init__(*args, **kwargs)

    class WithoutNormOfQueries(multi_latent_attention.MLASelfAttention):  # type: ignore[misc]
        def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
            kept = {name: getattr(submodules, name) for name in ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")}
            return {**kept, "linear_q_up_proj": IdentityOp, "q_layernorm": IdentityOp}

    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Latent
        if config.q_lora_rank is None:
            layer.submodules.self_attention.module = WithoutNormOfQueries


def block_spec(config: Any, **where: Any) -> Any:
    """The local specs of a stage's layers, with plain attention in all of them; `make_linear` puts in the other."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    # Since 0.19 the function refuses a config that has another attention.
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization="RMSNorm", **where)


def make_linear(config: Any, spec: Any, first: int = 0) -> None:
    """GatedDeltaNet and zero-centred norms with local layers: megatron has specs for transformer-engine's only.

    Args:
        config: of the whole model.
        spec: of a pipeline stage, which is changed.
        first: the number of the stage's first layer.
    """
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    # Since 0.19 the module is a package, and its part `common` uses these names.
    using: Any = sys.modules[gated_delta_net.GatedDeltaNetSubmodules.__module__]
    using.HAVE_FLA, using.l2norm = True, l2norm
    own = gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, ZeroCentredNorm, RowParallelLinear)
    spec.layer_norm = ZeroCentredNorm
    spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
    which = config.linear_attention_freq[first : first + len(spec.layer_specs)]
    for layer, is_linear in zip(spec.layer_specs, which, strict=True):
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCentredNorm
        if is_linear:
            parts.self_attention = ModuleSpec(module=gated_delta_net.GatedDeltaNet, submodules=own)
        else:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = ZeroCentredNorm


def l2norm(tensor: torch.Tensor) -> torch.Tensor:
    """Flash-linear-attention's, which needs a GPU."""
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)


class ZeroCentredNorm(torch.nn.Module):
    """Transformer-engine's RMSNorm with `layernorm_zero_centered_gamma`; the local one refuses that."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.empty(hidden_size)), eps

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * torch.rsqrt(tensor.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def load(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Every tensor into its place; rows that pad the vocabulary are zeros."""
    own = {
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    assert own.keys() == tensors.keys(), sorted(own.keys() ^ tensors.keys())
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            assert (tensor.shape[0], own[name].shape[0]) == (VOCAB, PADDED_VOCAB), name
            own[name].data.zero_()
        own[name].data[: tensor.shape[0]] = tensor


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
