"""Which HuggingFace tensors make up which Megatron tensors, and what `config.json` means to Megatron.

An architecture of one's own is a table of names, what the table needs to know from `config.json`, and what the fields
of `config.json` are in megatron:

    from mcore_ckpt.models import Architecture, ModelFacts, Row, Table, model_from_config, register_architecture
    from mcore_ckpt.models.architectures.common import ATTENTION, MODEL, NORMS, alike, facts_of, sizes_of
    from mcore_ckpt.models.config_rules import DENSE
    from mcore_ckpt.models.rope_rules import ROPE

    MLP = (
        Row("mlp.linear_fc1.weight", {"ff.w1.weight": "ffn hidden", "ff.w3.weight": "ffn hidden"}),
        Row("mlp.linear_fc2.weight", {"ff.w2.weight": "hidden ffn"}),
    )
    register_architecture(
        Architecture(
            "my_model",
            ("MyModelForCausalLM",),
            Table(MODEL, (*NORMS, *ATTENTION, *MLP)),
            lambda config: ModelFacts(sizes_of(config), frozenset(facts_of(config)), alike(config)),
            (*DENSE, ROPE),
        )
    )
"""

from mcore_ckpt.models.architecture import Architecture, HfModel, ModelFacts, read_config
from mcore_ckpt.models.mapping import HfTensor, Slab, hf_tensors
from mcore_ckpt.models.mcore_config import McoreConfig, check_model, gpt_arguments, to_hf_config, to_mcore_config
from mcore_ckpt.models.reconcile import reconcile
from mcore_ckpt.models.registry import known_architectures, model_from_config, register_architecture
from mcore_ckpt.models.table import Row, Table

__all__ = [
    "Architecture",
    "HfModel",
    "HfTensor",
    "McoreConfig",
    "ModelFacts",
    "Row",
    "Slab",
    "Table",
    "check_model",
    "gpt_arguments",
    "hf_tensors",
    "known_architectures",
    "model_from_config",
    "read_config",
    "reconcile",
    "register_architecture",
    "to_hf_config",
    "to_mcore_config",
]
