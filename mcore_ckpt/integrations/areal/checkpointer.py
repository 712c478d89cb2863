"""Replaces the checkpointer that AReaL's MegatronEngine (1.0.4) calls as `engine.checkpointer`."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import is_role, parse_step
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.integrations.areal.export import HfExport
from mcore_ckpt.integrations.areal.loggers import enable_loggers
from mcore_ckpt.integrations.kit.kept import KeptManager
from mcore_ckpt.integrations.kit.options import refuse_fast, refuse_skip
from mcore_ckpt.manager import CheckpointManager

logger = logging.getLogger(__name__)

# The role of a checkpoint in a folder that is not part of a step. AReaL gives a single engine this name.
SINGLE_ROLE = "default"


@dataclasses.dataclass(frozen=True)
class _Place:
    """The root, step and role of a checkpoint, derived from the folder that AReaL names (`SaveLoadMeta.path`)."""

    path: Path
    root: Path
    role: str
    step: int


def _place(local_path: str | Path) -> _Place:
    path = Path(os.path.abspath(local_path))
    step = parse_step(path.parent.name)
    if step is not None and is_role(path.name):
        return _Place(path, path.parent.parent, path.name, step)
    # A folder that is not part of a step gets the step number 0, because SaveLoadMeta has no number. A save commits the
    # folder in the same way as a role of a step, but no listing of steps contains the folder.
    return _Place(path, path.parent, SINGLE_ROLE, 0)


class Checkpointer:
    """Saves and loads one engine. Every rank of the engine makes a Checkpointer, and all ranks call the same methods.

    A path `<root>/global_steps_{N}/<name>` is an engine's role in a step. A save to any other path is committed in the
    same way, and replaces an older folder there.

    The arguments are the engine's objects, which CheckpointManager describes. The config's `save_contents` and
    `load_contents` have no effect, because each call names the contents.

    Raises:
        InvalidArgumentError: the config has rules of retention, although the RecoverHandler decides which steps stay;
            or it has `roles`; or it names a remote store, where the steps would lack their recover_info.
        UnsupportedError: the config has a fast tier.

    Example:
        >>> engine.checkpointer = Checkpointer(engine.model, engine.optimizer, engine.lr_scheduler)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        *,
        hf_config: Any = None,
        processing_class: Any = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        self._trainer = {
            "model": list(model),
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "hf_config": hf_config,
            "processing_class": processing_class,
        }
        self._config = config or CheckpointConfig()
        for field in ("max_to_keep", "keep_every", "keep_best", "keep_for", "optimizer_for_last", "remote", "roles"):
            if getattr(self._config, field) not in (None, ()):
                raise InvalidArgumentError(f"{field} is not for engines of AReaL: leave it out of checkpoint_config")
        refuse_fast(self._config, "checkpoint_config", "AReaL's RecoverHandler writes recover_info only to the root")
        refuse_skip(
            self._config, "checkpoint_config", "AReaL's RecoverHandler needs a save of each engine to complete a step"
        )
        self._saving = KeptManager()
        self._export: HfExport | None = None

    def save_checkpoint(
        self,
        local_path: str | Path,
        with_model: bool = True,
        with_optimizer: bool = True,
        with_rng: bool = True,
    ) -> None:
        """Saves into exactly `local_path`. With `async_save` the commit follows some time after this method returns.

        Raises:
            CheckpointError: see `CheckpointManager.save`. An older checkpoint in this folder stays.
            ValueError: there is nothing to save, because all three flags are False.
        """
        enable_loggers()
        place, contents = _place(local_path), _contents(with_model, with_optimizer, with_rng)
        config = dataclasses.replace(self._config, save_contents=contents)
        manager = self._saving.get(place.root, self._trainer | {"role": place.role}, config)
        manager.save(place.step, path=place.path)

    def load_checkpoint(
        self,
        local_path: str | Path,
        with_model: bool = True,
        with_optimizer: bool = True,
        with_rng: bool = True,
    ) -> None:
        """Loads exactly the folder `local_path`. The LR scheduler is loaded together with the optimizer.

        The checkpoint may have been saved under another parallel layout. AReaL's own `torch_dist` folders can be
        loaded, too.

        Raises CheckpointError: see `CheckpointManager.load`.
        """
        enable_loggers()
        self.wait_async_saves()
        place, contents = _place(local_path), _contents(with_model, with_optimizer, with_rng)
        config = dataclasses.replace(self._config, load_contents=contents, async_save=False)
        with self._saving.loader(place.root, self._trainer | {"role": place.role}, config) as loader:
            loader.load(path=place.path)

    def export(self, path: str | Path, processing_class: Any = None, wait: bool = True) -> None:
        """Writes the model in HuggingFace's format into exactly the folder `path`, which appears once it is complete.

        Args:
            path: the folder. An existing folder is replaced.
            processing_class: the tokenizer or processor to write with the weights; None: the engine's.
            wait: True waits until the folder is there. False waits only until the model may change again.

        Raises:
            UnsupportedError: there is no table for this architecture. Nothing was exported.
            CheckpointError: this export or the previous export failed.
        """
        enable_loggers()
        self._end_export()
        folder = Path(os.path.abspath(path))
        config = dataclasses.replace(
            self._config, save_contents=("hf_model",), async_save=not wait, async_mode="snapshot"
        )
        trainer = {**self._trainer, "optimizer": None, "lr_scheduler": None, "role": SINGLE_ROLE}
        if processing_class is not None:
            trainer["processing_class"] = processing_class
        self._export = HfExport(CheckpointManager(folder.parent, config=config, **trainer), folder)
        if wait:
            self._end_export()

    def wait_async_saves(self) -> None:
        """Waits until no save and no export is under way. Every rank calls this method.

        Raises CheckpointError: a save or an export failed, and no earlier call has raised its error.
        """
        self._end_export()
        self._saving.wait()

    def close(self) -> None:
        """Waits for saves and exports that are under way, and frees their host memory. Further calls do nothing.

        Raises CheckpointError: see `wait_async_saves`.
        """
        try:
            self._end_export()
        finally:
            self._saving.close()

    def _end_export(self) -> None:
        export, self._export = self._export, None
        if export is not None:
            export.end()


def _contents(with_model: bool, with_optimizer: bool, with_rng: bool) -> tuple[str, ...]:
    asked = {"model": with_model, "optimizer": with_optimizer, "extra": with_rng}
    return tuple(word for word, is_wanted in asked.items() if is_wanted)
