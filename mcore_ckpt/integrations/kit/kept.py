"""Keeps one CheckpointManager between saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.manager import CheckpointManager


class KeptManager:
    """Keeps a CheckpointManager, and makes another only if what it was made for has changed.

    A manager has a plan and as much host memory as the training state needs. So it is kept between saves, and it is
    closed before another one is made. Every rank calls the same methods.
    """

    def __init__(self) -> None:
        self.manager: CheckpointManager | None = None
        self._made_for: tuple[Any, ...] = ()

    def get(self, root: str | Path, trainer: Mapping[str, Any], config: CheckpointConfig) -> CheckpointManager:
        """Returns the manager for a root, a trainer's objects and options.

        Args:
            root: the folder of all steps.
            trainer: the other arguments of CheckpointManager, by name. `model` is a list.
            config: the options.

        Raises CheckpointError: see CheckpointManager; or a save of the manager before failed, and no earlier call has
        raised its error.
        """
        # The objects stay alive as long as the manager does, so no other object can have the identity of one of them.
        objects = [*trainer["model"], trainer.get("optimizer"), trainer.get("lr_scheduler")]
        made_for = (Path(root), trainer.get("role"), config, *map(id, objects))
        if self.manager is None or self._made_for != made_for:
            before = self.manager
            self.close()
            self.manager = CheckpointManager(root, config=config, **trainer)
            if before is not None and (before.root, before.role) == (self.manager.root, self.manager.role):
                self.manager.go_on_from(before)
            self._made_for = made_for
        return self.manager

    def wait(self) -> None:
        """Waits until no save is under way. Raises CheckpointError if one failed and no earlier call has raised it."""
        if self.manager is not None:
            self.manager.wait()

    def close(self) -> None:
        """Waits as `wait` does, and frees the host memory that saves use. It may be called more than once."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.close()
