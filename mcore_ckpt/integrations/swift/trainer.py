"""A mixin that makes a Megatron trainer of ms-swift (4.6) save and load with this package."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift.megatron.utils import load_mcore_checkpoint
from swift.utils import is_master

from mcore_ckpt import SaveHandle
from mcore_ckpt.checkpoint import MANIFEST_FILE
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.kit.loop import Loaded, LoopCheckpoints, Training
from mcore_ckpt.integrations.kit.objects import changed
from mcore_ckpt.integrations.kit.options import kept_count
from mcore_ckpt.integrations.swift.options import arguments, read_config, refuse_unsupported
from mcore_ckpt.steps import PreservationPolicy, complete_steps, delete_old_steps, list_steps, write_tracker

logger = logging.getLogger(__name__)

ROLE = "actor"
"""The folder in `checkpoint-{N}` that takes the place of ms-swift's `iter_{N}`."""

# The modules that call `load_mcore_checkpoint`. The second module is imported only for RLHF, because it needs more
# packages.
LOADING = ("swift.megatron.trainers.base", "swift.megatron.trainers.rlhf_mixin")
SAVING = ("swift.megatron.trainers.base",)
# merge_lora writes the merged weights of `checkpoint-{N}` to a folder with this suffix.
_MERGED = "-merged"
# The fields that a resumed run needs to keep the best checkpoint. ms-swift itself forgets them.
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


class CheckpointTrainer:
    """A mixin that saves and loads with this package. The mixin must be the first base.

    ms-swift's own methods still decide when and where to save, and write all files except Megatron's state into
    `checkpoint-{N}`. While these methods run, only the two functions that they call for Megatron's state are replaced.
    """

    # Attributes of BaseMegatronTrainer.
    args: Any
    state: Any
    config: Any
    template: Any
    wrapped_models: list[Any]
    optimizer: Any
    opt_param_scheduler: Any

    _own: CheckpointConfig
    _checkpoints: LoopCheckpoints
    _committing: tuple[SaveHandle, Callable[[], Any]] | None = None

    def _load_checkpoint(self) -> None:
        refuse_unsupported(self.args)
        self._own = read_config(self.args)
        self._checkpoints = LoopCheckpoints()
        with replaced(LOADING, "load_mcore_checkpoint", self._load):
            super()._load_checkpoint()  # type: ignore[misc]

    def _load_iteration(self) -> int:
        """Returns the iteration of the HuggingFace weights that the run starts from, if they belong to a checkpoint."""
        args = self.args
        named = args.adapters[0] if args.tuner_type != "full" and args.adapters else args.model
        folder = None if named is None else _step_of_weights(named)
        if folder is None:
            iteration = int(super()._load_iteration())  # type: ignore[misc]
            if iteration and not getattr(args, "consumed_train_samples", 0):
                logger.warning(
                    "%s belongs to iteration %d, but does not say how many samples the training had read, so training "
                    "will read them again. To prevent this, put the folder next to the checkpoint from which it was "
                    "made",
                    named,
                    iteration,
                )
            return iteration
        options = arguments(args, load=folder, exit_on_missing_checkpoint=True, no_load_optim=True, no_load_rng=True)
        config = replace(self._own, load_contents=("extra",))
        training = self._training([], self.optimizer)
        return self._take_over(self._found(self._checkpoints.load(training, options, config)))

    def save_checkpoint(self) -> None:
        """Saves `<output_dir>/checkpoint-{iteration}`, as ms-swift does. Every rank calls this method.

        Raises CheckpointError: see CheckpointManager.save.
        """
        with replaced(SAVING, "save_mcore_checkpoint", self._save):
            super().save_checkpoint()  # type: ignore[misc]

    def run_train_step(self, *args: Any, **kwargs: Any) -> Any:
        self._link_committed()
        return super().run_train_step(*args, **kwargs)  # type: ignore[misc]

    def finalize_training(self) -> None:
        """Ends the training, and waits for a save that is under way. Raises CheckpointError if that save fails."""
        super().finalize_training()  # type: ignore[misc]
        self._checkpoints.finalize(terminate=True)
        self._link_committed()

    def _rotate_checkpoints(self, output_dir: str) -> None:
        """Keeps `save_total_limit` checkpoints, the newest and the best, and deletes older checkpoints.

        Only rank 0 calls this method. Checkpoints are counted on disk and by step, so a restart changes nothing. Pinned
        checkpoints stay. The checkpoint that was saved just now also stays, even if the run went back and checkpoints
        of later steps exist.
        """
        limit = kept_count(self.args.save_total_limit)
        if limit is None:
            return
        root, best = Path(output_dir), self.state.best_global_step
        # ms-swift refuses a limit of 1 (MegatronArguments.__post_init__), so the newest checkpoint stays in addition to
        # the best.
        is_older = best in [status.step for status in complete_steps(root)][:-limit]
        policy = PreservationPolicy(limit - 1 if is_older else limit)
        for step in delete_old_steps(root, policy, self.state.iteration, [best] if is_older else []):
            # merge_lora puts the merged model into this folder.
            shutil.rmtree(root / f"checkpoint-{step}{_MERGED}", ignore_errors=True)

    def _save(
        self,
        args: Any,
        models: list[Any],
        optimizer: Any = None,
        opt_param_scheduler: Any = None,
        iteration: int = 1,
        output_dir: str | None = None,
        peft_format: bool = False,
        async_finalize_fn: Callable[[], Any] | None = None,
    ) -> bool:
        """Replaces ms-swift's `save_mcore_checkpoint`, with the same arguments."""
        step_path = Path(output_dir or args.output_dir)
        options = arguments(args, save=str(step_path.parent))
        training = self._training(self.wrapped_models, optimizer, opt_param_scheduler)
        # ms-swift passes no models if it keeps the weights only as safetensors (`save_safetensors`, `no_save_optim`).
        contents = self._own.save_contents if models else ("extra",)
        config = replace(self._own, skip_frozen=peft_format, save_contents=contents)
        handle = self._checkpoints.save(iteration, training, options, config, self._counters, path=step_path / ROLE)
        if is_master():
            # ms-swift reads the iteration of HuggingFace weights from this file, and copies it into a merged model.
            write_tracker(step_path, iteration)
        self._link_committed()  # links the previous save, for which the manager has waited
        if args.async_save and async_finalize_fn is not None:
            self._committing = (handle, async_finalize_fn)
        return bool(args.async_save)

    def _counters(self) -> dict[str, Any]:
        return {
            "num_floating_point_operations_so_far": 0,
            "consumed_train_samples": int(self.state.consumed_train_samples),
            **{name: getattr(self.state, name) for name in _BEST},
        }

    def _load(
        self,
        args: Any,
        ddp_models: list[Any],
        optimizer: Any = None,
        opt_param_scheduler: Any = None,
        load_arg: str = "mcore_model",
        adapter_name: str = "default",
    ) -> int:
        """Replaces ms-swift's `load_mcore_checkpoint`, with the same arguments."""
        folder = getattr(args, load_arg)
        is_peft = load_arg == "mcore_adapter"
        if load_arg.startswith("mcore_ref") or (args.tuner_type != "full" and not is_peft):
            # The folder has weights that are not trained: a reference model, or the base model of adapters.
            _refuse_ours(load_arg, folder)
            return int(
                load_mcore_checkpoint(
                    args, ddp_models, optimizer, opt_param_scheduler, load_arg=load_arg, adapter_name=adapter_name
                )
            )
        options = arguments(args, load=folder, exit_on_missing_checkpoint=True)
        config = replace(self._own, skip_frozen=is_peft)
        training = self._training(ddp_models, optimizer, opt_param_scheduler)
        loaded = self._found(self._checkpoints.load(training, options, config))
        logger.info("loaded iteration %d from %s", loaded.iteration, folder)
        return 0 if args.finetune else self._take_over(loaded)

    def _found(self, loaded: Loaded | None) -> Loaded:
        assert loaded is not None, "exit_on_missing_checkpoint makes a missing checkpoint an error"
        return loaded

    def _take_over(self, loaded: Loaded) -> int:
        """Restores the counters of a checkpoint. Returns the checkpoint's iteration."""
        self.args.consumed_train_samples = loaded.counters["consumed_train_samples"]
        for name in _BEST:
            setattr(self.state, name, loaded.state.get(name))
        return loaded.iteration

    def _training(self, model: list[Any], optimizer: Any = None, scheduler: Any = None) -> Training:
        hf_config = getattr(self.config, "hf_config", None)
        return Training(
            list(model or self.wrapped_models), optimizer, scheduler, ROLE, hf_config, self.template.processor
        )

    def _link_committed(self) -> None:
        """Makes ms-swift's link `last-checkpoint` point to an async save once the save is committed."""
        if self._committing is not None and self._committing[0].done:
            (handle, link), self._committing = self._committing, None
            if handle.committed and is_master():
                link()


def _is_ours(folder: str) -> bool:
    """Returns True for a step's folder, a role's folder, or the folder of all steps, if this package wrote them."""
    path = Path(folder)
    return any((each / MANIFEST_FILE).exists() for each in (path, path / ROLE)) or any(
        # A step with missing files counts, too: its load fails with the reason, and the run does not begin anew.
        status.is_claimed
        for status in list_steps(path)
    )


def _step_of_weights(folder: str) -> str | None:
    """Returns the folder of our step to which HuggingFace weights belong; None if there is no such step.

    The step is the folder of the weights or, for merged weights, the folder of the checkpoint that was merged. Merged
    weights have no counters: ms-swift would copy the counters from `iter_{N}/common.pt`, which no step of ours has.
    """
    if _is_ours(folder):
        return folder
    beside = Path(str(Path(folder)).removesuffix(_MERGED))
    return str(beside) if (beside / ROLE / MANIFEST_FILE).exists() else None


def _refuse_ours(option: str, folder: str) -> None:
    """Raises UnsupportedError if an option names a checkpoint of ours for weights that are not trained."""
    if _is_ours(folder):
        instead = {"mcore_model": "model", "mcore_ref_model": "ref_model"}.get(option, "ref_adapters")
        raise UnsupportedError(
            f"--{option} {folder}: mcore_ckpt has saved this folder, and loads only weights that are trained. Use "
            f"HuggingFace weights: set --{instead} to this folder if it has safetensors, or to the folder that "
            "mcore-ckpt merge makes from it"
        )


@contextmanager
def replaced(modules: Iterable[str], name: str, value: Any) -> Iterator[None]:
    """Replaces a name in modules of ms-swift by `value`. Modules that are not imported are left out.

    Raises UnsupportedError: a module has no such name.
    """
    there = [sys.modules[module] for module in modules if module in sys.modules]
    for module in there:
        if not hasattr(module, name):
            raise UnsupportedError(f"{module.__name__} has no {name}: use ms-swift 4.6, which mcore_ckpt supports")
    with ExitStack() as stack:
        for module in there:
            stack.enter_context(changed(module, **{name: value}))
        yield
