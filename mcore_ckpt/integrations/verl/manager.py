"""Defines the checkpoint manager that replaces verl's own manager in verl's engines and workers."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from mcore_ckpt import load_hf
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedError, reworded
from mcore_ckpt.integrations.kit.kept import KeptManager
from mcore_ckpt.integrations.kit.options import kept_count, refuse_skip
from mcore_ckpt.integrations.verl import resume
from mcore_ckpt.integrations.verl.driver_files import put_back
from mcore_ckpt.integrations.verl.options import read_options, settings_of
from mcore_ckpt.integrations.verl.place import Place
from mcore_ckpt.integrations.verl.stock_parts import (
    HEADS,
    adapter_folder,
    fill_adapters,
    fill_value_head,
    huggingface_weights,
    value_head_file,
)
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.steps import delete_step, list_steps, step_status

logger = logging.getLogger(__name__)

# All managers in this process. If actor and critic share the process, which is verl's default, the manager of each role
# sees here that a step has both roles.
_managers: WeakSet[MegatronCheckpointManager] = WeakSet()


class MegatronCheckpointManager:
    """A checkpoint manager that replaces verl's class of the same name. Every rank makes such a manager.

    The constructor touches nothing on disk, because only saves and loads name the folder.

    Args:
        model: the list of virtual chunks.
        optimizer: megatron's optimizer, or None.
        optimizer_scheduler: megatron's LR scheduler, or None. The scheduler's position is loaded together with the
            optimizer. verl's option `use_checkpoint_opt_param_scheduler` decides only whether the saved or the
            configured schedule continues from that position.
        checkpoint_config: verl's options `save_contents`, `load_contents` (None means model, optimizer and extra) and
            `async_save`, and the options that McoreCkptConfig adds.
        checkpoint_contents: the option of verl 0.4 that replaces both `save_contents` and `load_contents`.
        role: "actor" or "critic".
        hf_config: a transformers config to write into the checkpoint. `hf_model` needs it.
        processing_class: a tokenizer or processor to write into the checkpoint.
        tokenizer: the name of `processing_class` in verl 0.4.
        frees_memory: True if parameters or optimizer state are offloaded between the phases of a step. Then
            `save_checkpoint` returns only after it has copied the state, whatever `async_mode` is.
        peft_cls: given for a model with LoRA adapters. Only the adapters are then saved and loaded, because the trainer
            loads the base model from the base model's own files. `hf_model` writes the adapters in PEFT's form into
            `huggingface/adapter/`.
        use_megatron_fsdp: must be False.
        of_verl: other arguments that verl passes. They are ignored.

    Raises:
        UnsupportedError: `use_megatron_fsdp` is True.
        InvalidArgumentError: options contradict each other or have impossible values.
    """

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any = None,
        optimizer_scheduler: Any = None,
        checkpoint_config: Any = None,
        checkpoint_contents: Any = None,
        role: str = "actor",
        hf_config: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        peft_cls: Any = None,
        frees_memory: bool = False,
        use_megatron_fsdp: bool = False,
        **of_verl: Any,
    ) -> None:
        if use_megatron_fsdp:
            raise UnsupportedError("use_megatron_fsdp is not supported: use megatron's distributed optimizer")
        self.role = role
        self._options = read_options(checkpoint_config)
        if checkpoint_contents is not None:
            contents = tuple(checkpoint_contents)
            self._options = {"save_contents": contents, "load_contents": contents, **self._options}
        self._options["skip_frozen"] = peft_cls is not None
        if frees_memory:
            self._options["async_mode"] = "snapshot"
        self._trainer = {
            "model": model,
            "optimizer": optimizer,
            "lr_scheduler": optimizer_scheduler,
            "role": role,
            "hf_config": hf_config,
            "processing_class": tokenizer if processing_class is None else processing_class,
        }
        self._kept = KeptManager()
        self._config = settings_of(self._options, None)  # wrong options must raise here, not at the first save
        refuse_skip(self._config, "the checkpoint options", "verl writes its tracker after each save")
        self._delete_later: Place | None = None
        _managers.add(self)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Saves to exactly `local_path`. Every rank calls this method.

        Returns when the checkpoint is committed. With `async_save` it returns as soon as the training state may change
        or be offloaded.

        Args:
            local_path: `<root>/global_step_{N}/{role}`, or the step's folder itself (SFT). The tracker in the root
                names the step once all its roles are committed.
            hdfs_path: the same folder in a remote store that fsspec can reach. The upload runs in the background.
            global_step: the N in `local_path`.
            max_ckpt_to_keep: how many complete steps stay on disk, including steps that were saved before a restart.
                None keeps all steps. The remote store always keeps all steps.

        Raises:
            CheckpointError: this save failed, or an earlier async save did. All ranks raise the same error.
        """
        place = Place.of(local_path, self.role)
        manager = self._manager_of(place, settings_of(self._options, kept_count(max_ckpt_to_keep), hdfs_path))
        manager.save(int(global_step), path=place.folder, roles=self._roles(place))
        if self._delete_later is not None and dist.get_rank() == 0:
            try:
                self._delete_loaded(self._delete_later, place)
            except OSError as error:
                logger.warning("%s could not be deleted: %s", self._delete_later.step_path, error)
        if self._config.fast is not None:
            self._remove_bare_steps(manager, place)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Loads the checkpoint in `local_path`, which this package or verl's own manager wrote.

        Every rank calls this method.

        Args:
            local_path: see `save_checkpoint`.
            hdfs_path: where to load from if `local_path` does not exist.
            del_local_after_load: True deletes the loaded step, but only once a newer step is complete. Otherwise a
                crash in between would leave nothing to resume from.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or a trainer died while it saved the step. The message
                names the newest complete step. If the tracker named the step that cannot be loaded, the tracker now
                names that complete step.
            CheckpointCorruptError: the checkpoint is damaged. The message names the newest complete step, and the
                tracker is changed, as for CheckpointNotFoundError.
            CheckpointMismatchError: the checkpoint does not fit the model. Nothing was loaded, except perhaps
                weights that verl's own manager had saved.
        """
        place = Place.of(local_path, self.role)
        config = settings_of(self._options, None, hdfs_path)
        if self._is_in(place.root) and not hdfs_path:
            # Keep the `max_to_keep` that earlier saves have given this manager.
            config = replace(self._config, load_contents=config.load_contents)
        manager = self._manager_of(place, config)
        request = {"path": str(place.folder)}
        on_nodes = {found.step: found for found in manager.fast_steps_found((self.role,), None)[0]}
        seen = manager.agree("looking for verl's checkpoint", request, lambda: self._look_at(place, on_nodes))
        try:
            if seen["lacks"]:
                raise CheckpointNotFoundError(f"{place.folder}: not a complete step: {seen['lacks']}")
            self._load(manager, place, seen)
        except (CheckpointNotFoundError, CheckpointCorruptError) as error:
            has_copies = self._config.remote is not None
            outcome = (self._kept.manager or manager).agree(
                "going back to an older step",
                request,
                lambda: {"advice": resume.send_back(place, has_copies, on_nodes)},
            )
            raise reworded(error, f"{error}; {outcome['advice']}") from error
        if del_local_after_load:
            self._delete_later = place

    def _remove_bare_steps(self, manager: CheckpointManager, place: Place) -> None:
        """Removes verl's data of steps that only the nodes had, and that the nodes no longer have.

        Every rank calls this method.
        """

        def bare() -> dict[str, Any]:
            try:
                return {"steps": resume.bare_steps(place)}
            except OSError as error:
                logger.warning("%s: data of steps that only the nodes had cannot be deleted: %s", place.root, error)
                return {"steps": []}

        steps = manager.agree("looking for data without a checkpoint", {"path": str(place.folder)}, bare)["steps"]
        if not steps:
            return
        whole, lost = manager.fast_steps_found((self.role,), None)
        there = {each.step for each in whole} | {each.step for each in lost}
        if dist.get_rank() == 0:
            try:
                resume.remove_steps(place.root, set(steps) - there)
            except OSError as error:
                logger.warning("%s: data of steps that only the nodes had cannot be deleted: %s", place.root, error)

    def _load(self, manager: CheckpointManager, place: Place, seen: dict[str, Any]) -> None:
        if not seen["there"] and place.step is not None and self._config.remote is not None:
            manager.load(step=place.step)
            return
        contents = self._config.load_contents
        rest = tuple(word for word in contents if word not in ("model", "hf_model"))
        if "model" not in contents or not (seen["weights"] or seen["adapters"]):
            manager.load(path=place.folder)
            return
        # If the optimizer is loaded below, do not fill its main parameters from the weights here: the checkpoint has
        # the main parameters in fp32.
        model, optimizer = self._trainer["model"], None if "optimizer" in rest else self._trainer["optimizer"]
        if seen["adapters"]:
            fill_adapters(manager, model, optimizer, Path(seen["adapters"]))
        else:
            ignore = HEADS if seen["value_head"] else ()
            load_hf(model, seen["weights"], ignore=ignore, optimizer=optimizer, timeout_s=self._config.timeout_s)
        if seen["value_head"]:
            fill_value_head(manager, model, optimizer, Path(seen["value_head"]))
        if rest:
            self._manager_of(place, replace(self._config, load_contents=rest)).load(path=place.folder)

    def _look_at(self, place: Place, on_nodes: resume.OnNodes) -> dict[str, Any]:
        """Returns what rank 0 sees in a folder, as JSON values.

        The values say whether a checkpoint is there, what its step lacks, and which files verl's own manager wrote (an
        empty text for a missing file). `on_nodes` has the steps in the nodes' folders of a fast tier.
        """
        # With adapters, verl 0.7.0 also writes HuggingFace weights with the adapters merged into them. The base model
        # must not get these merged weights.
        weights = None if self._config.skip_frozen else huggingface_weights(place.folder)
        return {
            "there": place.step in on_nodes or resume.is_checkpoint(place.folder),
            "lacks": self._damage_of_driver(place) or resume.why_not_whole(place, on_nodes),
            "weights": str(weights or ""),
            "adapters": str(adapter_folder(place.folder) or ""),
            "value_head": str((weights and value_head_file(weights)) or ""),
        }

    def _damage_of_driver(self, place: Place) -> str | None:
        """Restores the driver's files of a step. Returns what is damaged, or None."""
        # The actor's manager alone does this, because verl loads the actor before the driver loads its files.
        if place.step_path is None or place.is_flat or self.role != "actor":
            return None
        try:
            put_back(place.step_path)
        except CheckpointCorruptError as error:
            return str(error)
        return None

    def wait(self) -> None:
        """Waits until no save and no upload is under way. Every rank calls this method.

        Raises CheckpointError: a save failed, and no earlier call has raised its error.
        """
        self._kept.wait()

    def close(self) -> None:
        """Waits for a save that is under way and frees the host memory that saves use. Every rank calls this method.

        Raises CheckpointError: see `wait`.
        """
        _managers.discard(self)
        self._kept.close()

    def _manager_of(self, place: Place, config: CheckpointConfig) -> CheckpointManager:
        """Returns the manager. Makes a new manager if there is none, or if the root or the options have changed."""
        manager = self._kept.get(place.root, self._trainer, config)
        self._config = config
        return manager

    def _is_in(self, root: Path) -> bool:
        """True if there is a manager for this root."""
        return self._kept.manager is not None and self._kept.manager.root == root

    def _roles(self, place: Place) -> tuple[str, ...]:
        """Returns the roles that the step consists of. The step is complete once all of them are committed."""
        if place.is_flat:
            return (self.role,)
        if self._config.roles is not None:
            return self._config.roles
        here = [other for other in _managers if other._kept.manager is None or other._is_in(place.root)]
        return tuple(sorted({self.role, *(other.role for other in here)}))

    def _delete_loaded(self, loaded: Place, saved: Place) -> None:
        """If a newer step is complete, deletes the step that was loaded. Raises OSError."""
        if loaded.step_path is None or loaded.step is None:
            return
        others = [status for status in reversed(list_steps(saved.root)) if status.path != loaded.step_path]
        # Commit numbers of different roots cannot be compared. If the roots differ, each step of the new root counts as
        # newer.
        is_elsewhere = saved.root != loaded.root
        status = step_status(loaded.step_path)
        last = status.commit.number
        newer = [s for s in others if self.role in s.committed and (is_elsewhere or s.commit.number > last)]
        if not any(each.is_complete for each in newer):
            return
        if not loaded.step_path.exists():
            self._delete_later = None  # retention, or the manager of another role, has deleted the step
        elif not status.is_complete:
            logger.warning("%s was to be deleted, but stays: %s", loaded.step_path, status.reason)
            self._delete_later = None
        elif delete_step(status) is None:
            self._delete_later = None
