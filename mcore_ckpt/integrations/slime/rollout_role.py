"""Saves slime's data source as a role of the actor's step: the position in the prompts, and the buffer.

slime's driver saves the models first, and then calls its data source, which runs in another process
(`RolloutManager.save`, 2026-08). So the step declares a role `rollout` of plain files, and is complete once that role
is committed, too. slime itself never saves the buffer of samples that were aborted in a partial rollout.

    <save>/global_steps_{rollout id}/
    ├── actor/
    └── rollout/
        ├── global_dataset_state_dict_{rollout id}.pt       written by slime's own method
        └── buffer.pt                                       only if there are samples in the buffer
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from mcore_ckpt.checkpoint import MANIFEST_FILE, step_dir
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CheckpointError, CommitError, HungDiskError, UnsupportedError
from mcore_ckpt.integrations.kit.arguments import Arguments
from mcore_ckpt.integrations.kit.driver import delete_after_driver, driver_agreement
from mcore_ckpt.state import from_stored, to_stored
from mcore_ckpt.steps import RoleReader, RoleWriter, commit_role, move_tracker, remove_leftovers

logger = logging.getLogger(__name__)

ROLLOUT_ROLE = "rollout"
_BUFFER_FILE = "buffer.pt"
# args.mcore_ckpt cannot set these fields. slime has its own options --async-save and --no-load-optim, and --use-critic
# decides which roles a step has. Saves always copy at once (snapshot mode), because slime puts other models' weights
# into the live parameters between two steps (`_switch_model`).
_SAID_ELSEWHERE = ("async_save", "async_mode", "roles", "load_contents")


def read_options(args: Any) -> CheckpointConfig:
    """Returns the options of this package in `args.mcore_ckpt`. Raises InvalidArgumentError."""
    return CheckpointConfig.from_dict(getattr(args, "mcore_ckpt", None) or {}, "args.mcore_ckpt", but=_SAID_ELSEWHERE)


def models_of_step(args: Any, rollout_id: int, critic_is_beside: bool) -> tuple[str, ...]:
    """Returns which models the driver saves below `args.save` in one step; () if none.

    `critic_is_beside` is True if the critic is saved to the same folder as the actor.
    """
    has_actor = not args.use_critic or rollout_id >= args.num_critic_only_steps
    return (*(("actor",) if has_actor else ()), *(("critic",) if args.use_critic and critic_is_beside else ()))


def has_rollout_role(args: Any) -> bool:
    """True if the data source that `--data-source-path` names saves into the steps. Raises ImportError."""
    path = getattr(args, "data_source_path", None)
    if not path or not args.rollout_global_dataset:
        return False
    module, _, name = path.rpartition(".")
    chosen = getattr(import_module(module), name)
    return isinstance(chosen, type) and issubclass(chosen, RolloutInStep)


class RolloutInStep:
    """A mixin that makes a data source of slime save into the steps of the actor. The mixin must be the first base.

    Attributes:
        package: the name of the package: slime or a fork.
        keeps_buffer: whether the samples in `buffer` are saved. Use False if samples have images or other objects that
            are not plain values.

    Example:
        >>> class MySource(RolloutInStep, RolloutDataSourceWithBuffer): ...  # doctest: +SKIP
    """

    package: ClassVar[str] = "slime"
    keeps_buffer: ClassVar[bool] = True

    args: Any
    buffer: Any

    def save(self, rollout_id: int) -> None:
        """Commits the position and the buffer to the step of this rollout.

        The driver calls this method after the models' saves.

        Raises:
            UnsupportedError: a sample in the buffer has something other than plain values and tensors.
            CommitError: the files could not be written. With `if_failed: warn` both errors are logged instead, and the
                step stays incomplete.
        """
        models = models_of_step(self.args, rollout_id, self._critic_is_beside())
        if not models or not self.args.rollout_global_dataset:
            super().save(rollout_id)  # type: ignore[misc]
            return
        options = read_options(self.args)
        try:
            self._commit(rollout_id, (*models, ROLLOUT_ROLE), options.timeout_s)
        except CheckpointError as error:
            if options.if_failed != "warn":
                raise
            logger.warning("the step of rollout %d stays incomplete: %s", rollout_id, error)
            return
        self._delete_old(rollout_id, options)

    def load(self, rollout_id: int | None = None) -> None:
        """Loads the position and the buffer from the step of this rollout, or else the position from slime's own file.

        Raises CheckpointCorruptError: a file of the step is missing or damaged.
        """
        folder = None
        if self.args.load is not None and rollout_id is not None and rollout_id >= 0:  # -1 if the run begins anew
            folder = step_dir(Path(self.args.load), rollout_id)
        if folder is None or not (folder / ROLLOUT_ROLE / MANIFEST_FILE).exists():
            super().load(rollout_id)  # type: ignore[misc]
            return
        files = RoleReader(folder / ROLLOUT_ROLE)
        for file in files.manifest.files:
            files.read(file.path, file.size)
        with self._with_folders(load=str(folder)):
            super().load(rollout_id)  # type: ignore[misc]
        if any(file.path == _BUFFER_FILE for file in files.manifest.files):
            self._fill_buffer(from_stored(files.read_values(_BUFFER_FILE)["groups"]))

    def _critic_is_beside(self) -> bool:
        return getattr(self.args, "megatron_config_path", None) is None

    def _commit(self, rollout_id: int, roles: Sequence[str], timeout_s: float) -> None:
        root = Path(self.args.save)
        buffer = self._read_buffer()
        with TemporaryDirectory() as folder:
            with self._with_folders(save=folder):
                super().save(rollout_id)  # type: ignore[misc]
            written = Path(folder) / ROLLOUT_ROLE
            position = {path.name: path.read_bytes() for path in sorted(written.glob("*"))}
        if not position:
            raise CommitError(f"{type(self).__name__}.save wrote no file below 'rollout' for rollout {rollout_id}")

        def write(files: RoleWriter) -> None:
            for name, data in position.items():
                files.write(name, data)
            if buffer:
                files.write_values(_BUFFER_FILE, {"groups": buffer})

        commit_role(
            # This commit takes no trainer lock, because the locks of the models' roles protect this role, too.
            driver_agreement(ROLLOUT_ROLE, timeout_s),
            step_dir(root, rollout_id) / ROLLOUT_ROLE,
            rollout_id,
            roles,
            write,
            before=lambda: remove_leftovers(root, ROLLOUT_ROLE, alone=True),
            after=lambda: move_tracker(root, rollout_id),
        )

    def _delete_old(self, rollout_id: int, options: CheckpointConfig) -> None:
        config = Arguments(self.args).saving(options, with_optimizer=True)
        disk = driver_agreement(ROLLOUT_ROLE, options.timeout_s).runner
        try:
            disk.run(lambda: delete_after_driver(Path(self.args.save), ROLLOUT_ROLE, config, rollout_id))
        except HungDiskError as error:
            logger.warning("%s: old steps could not be deleted: %s", self.args.save, error)

    def _read_buffer(self) -> list[Any]:
        groups = list(getattr(self, "buffer", ()) if self.keeps_buffer else ())
        try:
            return [[to_stored(sample.to_dict(), "sample") for sample in group] for group in groups]
        except UnsupportedError as error:
            raise UnsupportedError(
                f"the buffer of the data source cannot be saved: {error}. To save without the buffer, set keeps_buffer "
                "= False in a subclass, and name this subclass by --data-source-path"
            ) from error

    def _fill_buffer(self, groups: list[Any]) -> None:
        if not hasattr(self, "buffer") or not self.keeps_buffer:
            logger.warning(
                "%d groups of samples were saved, but are not loaded, because this data source keeps no buffer",
                len(groups),
            )
            return
        sample: Any = import_module(f"{self.package}.utils.types").Sample
        self.buffer[:] = [[sample.from_dict(values) for values in group] for group in groups]

    @contextmanager
    def _with_folders(self, **folders: str) -> Iterator[None]:
        """Lets slime's own method use another folder. Changes a copy of `args`, because other code uses `args`, too."""
        args, self.args = self.args, copy(self.args)
        vars(self.args).update(folders)
        try:
            yield
        finally:
            self.args = args
