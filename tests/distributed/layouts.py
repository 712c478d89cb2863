"""The layouts that checkpoints are taken through, by name."""

import inspect
from importlib.util import find_spec

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.distributed.training import Layout

# Whether megatron keeps the replicas of experts alike where ETP ≠ TP and EP = 1, as it does since 0.19. See
# state/unsupported.py.
REDUCES_EXPERTS_APART = "use_expert_pgs" in inspect.getsource(ColumnParallelLinear)

HAS_HYBRID = find_spec("megatron.core.models.hybrid") is not None
# Whether the indexer of sparse attention computes what DeepSeek's does, as it does since 0.19.
HAS_SPARSE = "dsa_indexer_rope_interleaved" in TransformerConfig.__dataclass_fields__

LAYOUTS: dict[str, Layout] = {
    # one rank
    "plain": Layout(1),
    "mtp": Layout(1, mtp_layers=1),
    # two ranks: mostly kinds of optimizer
    "dp2-buckets": Layout(2, bucket_size=5000, overlap_grad_reduce=True),
    "dp2-bf16": Layout(2, precision="bf16"),
    "dp2-bf16-replicated": Layout(2, precision="bf16", distributed_optimizer=False),
    "dp2-two-dtypes": Layout(2, precision="bf16", fp32_norms=True),
    "dp2-two-dtypes-replicated": Layout(2, precision="bf16", fp32_norms=True, distributed_optimizer=False),
    "dp2-fp32-replicated": Layout(2, distributed_optimizer=False),
    "dp2-fp16": Layout(2, precision="fp16"),
    "dp2-fp16-replicated": Layout(2, precision="fp16", distributed_optimizer=False),
    "dp2-overlap": Layout(2, precision="bf16", bucket_size=5000, overlap_grad_reduce=True, overlap_param_gather=True),
    "dp2-frozen-layer": Layout(2, frozen=r"decoder\.layers\.1\."),
    # 40 elements are all in the first half of the one bucket of 128
    "dp2-nothing-to-own": Layout(2, frozen=r"^(?!decoder\.final_layernorm)"),
    "pp2-frozen-stage": Layout(2, pp=2, frozen=r"embedding|layers|final_layernorm"),
    # With 2 layers megatron refuses to save its own dp_reshardable optimizer: the bucket of the tied embedding ends 64
    # elements before its padding does (sharded_param_state_dp_reshardable, 0.16.1).
    "pp2-tied-bf16": Layout(2, pp=2, tied_embeddings=True, precision="bf16", num_layers=4),
    "dp2-expert-bias": Layout(2, experts=4, ep=2, expert_bias=True, precision="bf16"),
    "pp2-vpp2": Layout(2, pp=2, vpp=2, num_layers=4),
    "cp2": Layout(2, cp=2),
    "ep2": Layout(2, experts=4, ep=2),
    "ep2-replicated": Layout(2, experts=4, ep=2, precision="bf16", distributed_optimizer=False),
    "tp2": Layout(2, tp=2),
    "pp2-mtp": Layout(2, pp=2, mtp_layers=1),
    "tower-tp2": Layout(2, tp=2, tower="transformers"),
    "tower-megatron-tp2": Layout(2, tp=2, tower="megatron", precision="bf16"),
    "tower-pp2-tied": Layout(2, pp=2, tower="transformers", tied_embeddings=True, precision="bf16"),
    "tower-tp2-frozen": Layout(2, tp=2, tower="transformers", frozen=r"visual\."),
    "tower-pp2-vpp2": Layout(2, pp=2, vpp=2, tower="megatron", num_layers=4),
    # four ranks: mostly ways to cut a model
    "tower-tp2-pp2": Layout(4, tp=2, pp=2, tower="megatron"),
    "tower-ep2-dp4": Layout(4, experts=4, ep=2, tower="transformers"),
    "tp2-pp2": Layout(4, tp=2, pp=2),
    "pp2-vpp2-dp2": Layout(4, pp=2, vpp=2, num_layers=4),
    "dp4-buckets": Layout(4, bucket_size=5000, overlap_grad_reduce=True),
    "cp2-dp2": Layout(4, cp=2),
    "ep2-dp4": Layout(4, experts=4, ep=2),
    "tp2-ep2-etp1": Layout(4, tp=2, experts=4, ep=2, etp=1),
    "etp2-ep2": Layout(4, experts=4, ep=2, etp=2),
    "pp2-dp2-uneven": Layout(4, pp=2, num_layers=5, first_stage_layers=2),
    "pp2-vpp2-dp2-stages": Layout(4, pp=2, vpp=2, num_layers=6, stages="Et|t*2|t|t*2L"),
    "pp2-dp2-tied": Layout(4, pp=2, tied_embeddings=True),
    "cp2-ep2": Layout(4, cp=2, experts=4, ep=2, precision="bf16"),
    "dp4-two-instances": Layout(4, optimizer_instances=2),
    # eight ranks: everything at once
    "tp2-pp2-dp2": Layout(8, tp=2, pp=2),
    "tp2-pp2-ep2-etp1": Layout(8, tp=2, pp=2, experts=4, ep=2, etp=1),
}
if REDUCES_EXPERTS_APART:
    LAYOUTS["tp2-etp1"] = Layout(2, tp=2, experts=4, etp=1)
    LAYOUTS["etp2"] = Layout(2, experts=4, etp=2)
if HAS_HYBRID:
    LAYOUTS["hybrid"] = Layout(1, pattern="M*-MEG-/*-/*-", experts=4, mtp_layers=2)
    LAYOUTS["pp2-vpp2-hybrid"] = Layout(2, pp=2, vpp=2, pattern="M|*-|M*|-", precision="bf16")
