"""Converts between HuggingFace models and Megatron models: names of tensors, order of rows, fields of `config.json`.

One `Architecture` object describes each HuggingFace architecture. Its main parts are:

- `table`: which HuggingFace tensors make up which Megatron tensor;
- `read`: a function that reads from `config.json` what the table needs (sizes, features, kinds of layers);
- `rules`: objects that translate the fields of `config.json` to Megatron's arguments and back.

To add an architecture to this package, write a module `models/architectures/<name>.py` that exports `ARCHITECTURES`,
and add the module to `models/architectures/__init__.py`. A program outside the package registers its own architecture:

    from mcore_ckpt.models import Architecture, Row, Table, register_architecture
    from mcore_ckpt.models.architectures.common import ATTENTION, MODEL, NORMS, read_uniform
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
            read_uniform,
            (*DENSE, ROPE),
        )
    )
"""

from mcore_ckpt.models.architecture import Architecture, HfModel, ModelFacts, read_config
from mcore_ckpt.models.mapping import HfTensor, Slab, hf_tensors
from mcore_ckpt.models.mcore_config import McoreConfig, gpt_arguments, to_hf_config, to_mcore_config
from mcore_ckpt.models.reconcile import reconcile
from mcore_ckpt.models.registry import known_architectures, model_from_config, register_architecture
from mcore_ckpt.models.stated_facts import check_model
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
