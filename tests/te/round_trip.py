"""Saves, destroys and loads transformer-engine models. A job of te_server.py."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from tests.te.te_on_cpu import cuda_seems_available

LAYERS, EXPERTS = 4, 4

PARALLEL: dict[str, dict[str, int]] = {
    "dense": {},
    "moe": {},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "dense-specs": {},
    "moe-specs": {},
}

# What the local layer spec has under other names.
OF_LOCAL_SPEC = (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"(layers\.\d+)\.pre_mlp_layernorm\.", r"\1.mlp.linear_fc1.layer_norm_"),
    (r"\.local_experts\.(\d+)\.(linear_fc\d)\.weight", r".\2.weight\1"),
)

# What megatron builds from its TE specs, layer norms fused into the linears that follow them.
ATTENTION = {
    "self_attention.linear_proj._extra_state",
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv._extra_state",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.q_layernorm._extra_state",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm._extra_state",
    "self_attention.k_layernorm.weight",
    "self_attention.core_attention._extra_state",
}
DENSE_LAYER = ATTENTION | {
    "mlp.linear_fc1._extra_state",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2._extra_state",
    "mlp.linear_fc2.weight",
}
MOE_LAYER = (
    ATTENTION
    | {
        "pre_mlp_layernorm._extra_state",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.router.expert_bias",
        "mlp.experts.linear_fc1._extra_state",
        "mlp.experts.linear_fc2._extra_state",
        "mlp.shared_experts.linear_fc1._extra_state",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2._extra_state",
        "mlp.shared_experts.linear_fc2.weight",
    }
    | {f"mlp.experts.linear_fc{fc}.weight{expert}" for fc in (1, 2) for expert in range(EXPERTS)}
)
MODEL = {"embedding.word_embeddings.weight", "output_layer.weight"} | {
    f"decoder.final_layernorm.{kind}" for kind in ("weight", "_extra_state")
}


@dataclass
class Payload:
    """An `_extra_state` that is not empty, as TE's is with FP8: opaque bytes, not the same on any two modules."""

    state: torch.Tensor
    received: list[torch.Tensor] = field(default_factory=list)


def main(root: Path, names: Sequence[str]) -> None:
    """On each rank, in its process group: every layout of `PARALLEL` there and back; `root` is for checkpoints."""
    enable_cpu()
    for name in names:
        parallel_state.initialize_model_parallel(**PARALLEL[name], create_gloo_process_groups=False)
        moe = name in ("moe", "ep2", "moe-specs")
        (between_specs if name.endswith("-specs") else round_trip)(root / name, name, moe)
        parallel_state.destroy_model_parallel()


def round_trip(root: Path, name: str, moe: bool) -> None:
    model = build(name, moe, seed=1)
    payloads = give_payloads(model, seed=1)
    manager = manager_of(root, model)
    assert manager.save(5).committed
    manager.close()
    saved = own_tensors(model)
    check_files(root / "global_steps_5" / "actor", saved, moe)

    other = build(name, moe, seed=2)
    received = give_payloads(other, seed=2)
    for tensor in other.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor):
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 77)
    manager = manager_of(root, other)
    assert manager.load().step == 5
    manager.close()
    for key, payload in payloads.items():
        assert len(received[key].received) == 1, key
        assert_equal(key, received[key].received[0], payload.state)
    loaded = own_tensors(other)
    for key, tensor in saved.items():
        if not key.endswith("_extra_state"):
            assert_equal(key, loaded[key], tensor)


def between_specs(root: Path, name: str, moe: bool) -> None:
    """Local layers and transformer-engine's are the same tensors under other names, grouped experts among them."""
    for way, saving, loading in (("to-te", False, True), ("from-te", True, False)):
        model = build(name, moe, seed=1, te=saving)
        manager = manager_of(root / way, model)
        manager.save(5)
        manager.close()
        other = build(name, moe, seed=2, te=loading)
        for parameter in other.parameters():
            parameter.data.fill_(float("nan"))
        manager = manager_of(root / way, other)
        manager.load()
        manager.close()
        saved, loaded = (by_te_name(each, moe) for each in (model, other))
        assert saved.keys() == loaded.keys(), saved.keys() ^ loaded.keys()
        for key, tensor in saved.items():
            assert_equal(key, loaded[key], tensor)


def by_te_name(model: GPTModel, moe: bool) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in own_tensors(model).items():
        for pattern, te_name in OF_LOCAL_SPEC:
            if not (moe and "pre_mlp" in pattern):  # no linear layer follows the norm before experts
                name = re.sub(pattern, te_name, name)
        if not name.endswith("_extra_state"):
            tensors[name] = tensor
    return tensors


def build(name: str, moe: bool, seed: int, te: bool = True) -> GPTModel:
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        qk_layernorm=True,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        **PARALLEL[name],
        **(mixture() | {"moe_grouped_gemm": te} if moe else {}),
    )
    with cuda_seems_available():
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization="RMSNorm"),
            vocab_size=64,
            max_sequence_length=16,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
    for parameter in model.parameters():
        if not getattr(parameter, "allreduce", True):
            # All ranks draw the same numbers; without this experts 0 and 2 would be alike.
            parameter.data += parallel_state.get_expert_model_parallel_rank()
    return model


def mixture() -> dict[str, Any]:
    return {
        "num_moe_experts": EXPERTS,
        "moe_grouped_gemm": True,
        "moe_ffn_hidden_size": 48,
        "moe_shared_expert_intermediate_size": 24,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }


def give_payloads(model: GPTModel, seed: int) -> dict[str, Payload]:
    payloads = {}
    for index, (name, module) in enumerate(model.named_modules()):
        if isinstance(model.state_dict().get(f"{name}._extra_state"), torch.Tensor):
            # The ranks hold different modules, but for data-parallel replicas of what is no expert.
            replica = parallel_state.get_data_parallel_world_size() > 1 and ".experts." not in name
            generator = torch.Generator().manual_seed(seed if replica else seed + 100 + dist.get_rank())
            payload = Payload(torch.randint(0, 256, (index + seed,), dtype=torch.uint8, generator=generator))
            module.get_extra_state = lambda payload=payload: payload.state
            module.set_extra_state = payload.received.append
            payloads[f"{name}._extra_state"] = payload
    assert payloads
    return payloads


def manager_of(root: Path, model: GPTModel) -> CheckpointManager:
    config = CheckpointConfig(save_contents=("model",), load_contents=("model",), timeout_s=40.0)
    return CheckpointManager(root, model, None, None, role="actor", config=config)


def own_tensors(model: GPTModel) -> dict[str, torch.Tensor]:
    """This rank's tensors by the names they have in the whole model, found without the package under test."""
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    experts = EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()
    tensors = {}
    for local_name, value in model.state_dict().items():
        name = re.sub(r"^(decoder\.layers\.)(\d+)", lambda m: f"{m[1]}{layers[int(m[2])]}", local_name)
        name = re.sub(r"(experts\.linear_fc\d\.weight)(\d+)", lambda m: f"{m[1]}{first_expert + int(m[2])}", name)
        if isinstance(value, torch.Tensor):
            tensors[name] = value.detach().clone()
    return tensors


def check_files(role: Path, saved: dict[str, torch.Tensor], moe: bool) -> None:
    stored = {path.parent.name: torch.load(path, weights_only=True) for path in role.glob("model/*/model_states.pt")}
    layer = MOE_LAYER if moe else DENSE_LAYER
    wanted = MODEL | {f"decoder.layers.{number}.{name}" for number in range(LAYERS) for name in layer}
    found = {name for file in stored.values() for name in file}
    assert found == wanted, f"missing {sorted(wanted - found)}, added {sorted(found - wanted)}"
    stage = f"mp_rank_00_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    own = dict(stored[stage])
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        own |= stored[f"{stage}_{parallel_state.get_expert_model_parallel_rank():03d}"]
    assert own.keys() == saved.keys()
    for name, tensor in saved.items():
        assert_equal(name, own[name], tensor)


def assert_equal(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype, f"{name}: {found.dtype}, not {wanted.dtype}"
    assert torch.equal(found, wanted), name
