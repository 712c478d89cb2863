"""Megatron-LM's own `load_checkpoint` (megatron/training/checkpointing.py), as its loop calls it.

The wheels since 0.17 have it. Of its arguments, these are the ones that a load reads, with its defaults.
"""

import contextlib
import typing
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, num_microbatches_calculator, parallel_state
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from tests.distributed.foreign_checkpoints import rng_object, set_random_states, sharded_chunks
from tests.distributed.snapshot import poison
from tests.distributed.training import MICRO_BATCH_SIZE, Layout, Training

if not hasattr(typing, "override"):
    typing.override = lambda method: method  # 0.19 is written for Python 3.12

try:
    from megatron.training import checkpointing, global_vars
except ImportError:
    checkpointing = None

# What `check_checkpoint_args` compares is the model's.
ARGUMENTS: dict[str, Any] = {
    "add_position_embedding": False,
    "auto_detect_ckpt_format": False,
    "ckpt_assume_constant_structure": False,
    "ckpt_convert_update_legacy_dist_opt_format": False,
    "ckpt_format": "torch_dist",
    "ckpt_fully_parallel_load": True,
    "ckpt_fully_parallel_load_exchange_algo": "broadcast",
    "ckpt_fully_parallel_load_process_group": "dp",
    "ckpt_load_validate_sharding_integrity": True,
    "ckpt_step": None,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "data_parallel_random_init": False,
    "dist_ckpt_strictness": "assume_ok_unexpected",
    "exit_on_missing_checkpoint": True,
    "finetune": False,
    "load_main_params_from_ckpt": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "no_save_optim": False,
    "no_save_rng": False,
    "non_persistent_ckpt_type": None,
    "non_persistent_global_ckpt_dir": None,
    "phase_transition_iterations": None,
    "skipped_train_samples": 0,
    "stream_ckpt_dequant": False,
    "use_dist_ckpt": True,
    "verify_integrity": False,
    "vocab_file": None,
}


def arguments(layout: Layout, root: Path, **more: Any) -> Namespace:
    """Megatron-LM's arguments of a training of the tests."""
    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "world_size": layout.world,
        "data_parallel_size": layout.dp,
        "num_layers": layout.depth,
        "hidden_size": layout.hidden_size,
        "num_attention_heads": 4,
        "fp16": layout.precision == "fp16",
        "bf16": layout.precision == "bf16",
        "use_distributed_optimizer": layout.distributed_optimizer,
        "num_experts": layout.experts,
        "hybrid_layer_pattern": layout.pattern,
    }
    return Namespace(**{**ARGUMENTS, **sizes, "load": str(root), "save": str(root), **more})


def load(training: Training, args: Namespace) -> tuple[int, float]:
    """`load_checkpoint(model, optimizer, opt_param_scheduler)`, with these arguments."""
    with ready_to_load(args):
        return _load_with_its_own(training, args) if checkpointing else _load_with_its_calls(training, args)


@contextlib.contextmanager
def ready_to_load(args: Namespace) -> Iterator[None]:
    """With what `load_checkpoint` needs of the process: a calculator of micro-batches, and no version from before."""
    sizes = (MICRO_BATCH_SIZE * args.data_parallel_size, MICRO_BATCH_SIZE, args.data_parallel_size)
    num_microbatches_calculator.init_num_microbatches_calculator(dist.get_rank(), None, *sizes)
    if checkpointing:
        checkpointing._CHECKPOINT_VERSION = None
    try:
        yield
    finally:
        num_microbatches_calculator.destroy_num_microbatches_calculator()


def poison_for_megatron(training: Training) -> None:
    """Spoils all of a training but what Megatron-LM needs in order to load."""
    groups = training.optimizer.param_groups
    # Since 0.19 megatron also finds a group's counterpart by the rates that it was made with.
    found_by = [{key: group.get(key) for key in param_group_identifier_keys} for group in groups]
    poison(training)
    for group, fields in zip(groups, found_by, strict=True):
        group.update({key: value for key, value in fields.items() if key in group})
    training.scheduler.num_steps = 0  # which the scheduler's load counts on


def _load_with_its_own(training: Training, args: Namespace) -> tuple[int, float]:
    global_vars.set_args(args)
    try:
        return checkpointing.load_checkpoint(training.model, training.optimizer, training.scheduler)
    finally:
        global_vars.unset_global_variables()


def _load_with_its_calls(training: Training, args: Namespace) -> tuple[int, float]:
    """What core_r0.16's `load_checkpoint` does, whose wheel lacks it: the flags of `sharded_state_dict` are the file's.

    As there, random states are loaded under the same sizes only.
    """
    root = Path(args.load)
    folder = root / f"iter_{int((root / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    common = dist_checkpointing.load_common_state_dict(str(folder))
    saved, sizes = common["args"], ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    chunks = sharded_chunks(training, metadata)
    wanted = {"optimizer": training.optimizer.sharded_state_dict(chunks, is_loading=True, metadata=metadata), **chunks}
    has_rng = all(getattr(saved, name) == getattr(args, name) for name in sizes) and not saved.no_save_rng
    if has_rng:
        wanted["rng_state"] = rng_object(training)
    loaded = dist_checkpointing.load(wanted, str(folder))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding"):
        assert getattr(saved, name) == getattr(args, name), name
    args.consumed_train_samples = saved.consumed_train_samples
    for name, chunk in zip(chunks, training.model, strict=True):
        chunk.load_state_dict(loaded[name])
    training.optimizer.load_state_dict(loaded["optimizer"])
    training.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if has_rng:
        at = parallel_state.get_data_parallel_rank() if args.data_parallel_random_init else 0
        set_random_states(loaded["rng_state"][at])
    assert loaded["checkpoint_version"] == 3.0
    return loaded["iteration"], loaded["num_floating_point_operations_so_far"]
