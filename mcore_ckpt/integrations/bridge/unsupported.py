"""Refuses requests of Megatron-Bridge's contexts that this package cannot honour."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron.core.utils import unwrap_model

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.megatron.refusals import check_groups

# With these options, Bridge interleaves the rows of gate and up in the model, but saves gate and up one after the other
# (0.6.2, `_get_model_glu_...`).
_INTERLEAVED = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")

_NO_MODELOPT = (
    "mcore_ckpt does not save ModelOpt's own state, so a run could not resume. Leave out "
    "checkpoint.custom_manager_class"
)


def refuse_model(config: Any) -> None:
    """Raises UnsupportedError if `cfg.model` describes a model that our checkpoints cannot hold."""
    if getattr(config, "restore_modelopt_state", False):
        raise UnsupportedError(f"model.restore_modelopt_state is set: {_NO_MODELOPT}")
    model = getattr(config, "transformer", config)
    for name in _INTERLEAVED:
        if getattr(model, name, None) is not None:
            raise UnsupportedError(
                f"model.{name} is {getattr(model, name)}: this interleaves the rows of gate and up, which is not "
                "supported: leave it out"
            )


def refuse_save(ctx: Any) -> None:
    """Raises UnsupportedError if the context of a save asks for something unsupported. All ranks call this function."""
    if ctx.non_persistent_ckpt:
        raise UnsupportedError(
            "save(non_persistent_ckpt=True): mcore_ckpt has only one kind of checkpoint. Save just as often with "
            "checkpoint.save_interval and async_save, and set most_recent_k and save_retain_interval"
        )
    _refuse_both(ctx)


def refuse_load(ctx: Any) -> None:
    """Raises UnsupportedError if the context of a load asks for something unsupported. All ranks call this function."""
    if not ctx.strict:
        raise UnsupportedError(
            "load(strict=False): a checkpoint that does not fit the model is always refused: leave it out"
        )
    if ctx.skip_load_to_model_and_opt:
        raise UnsupportedError(
            "load(skip_load_to_model_and_opt=True): that is for torch's FSDP2, which is not supported: set "
            "dist.use_torch_fsdp2=False"
        )
    _refuse_both(ctx)


def _refuse_both(ctx: Any) -> None:
    module = getattr(ctx, "module_name", None)
    if module is not None:
        raise UnsupportedError(
            f"module_name={module!r}: the modules of MegatronMIMO have separate process groups, which is not "
            "supported: leave out checkpoint.custom_manager_class"
        )
    refuse_model(ctx.state.cfg.model)
    if any(map(_is_converted, ctx.model)):
        raise UnsupportedError(f"the model was converted by ModelOpt: {_NO_MODELOPT}")
    groups = getattr(ctx, "pg_collection", None)
    if groups is not None:
        check_groups(list(ctx.model), groups.tp, groups.pp, groups.dp_cp, groups.dp, groups.expt_dp)


def _is_converted(chunk: Any) -> bool:
    """True if ModelOpt has quantized, pruned or distilled a chunk of the model, which then has ModelOpt's state."""
    try:
        modelopt = import_module("modelopt.torch.opt")
    except ImportError:
        return False
    return bool(modelopt.ModeloptStateManager.is_converted(unwrap_model(chunk)))
