"""Keeps one CheckpointManager between saves, and keeps the training's place among all commits for the whole run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.steps import RunHistory


class KeptManager:
    """Keeps a CheckpointManager, and makes another manager only if the arguments have changed.

    A manager has a plan and as much host memory as the training state needs. So the manager is kept between saves, and
    closed before another manager is made. Frameworks load with one manager, and save with another manager, which may
    have another root. Nevertheless each save goes on from the last checkpoint that any of these managers has loaded or
    saved. Every rank calls the same methods.
    """

    def __init__(self) -> None:
        self.manager: CheckpointManager | None = None
        self._made_for: tuple[Any, ...] = ()
        self._parts: dict[str, Mapping[str, Any]] = {}
        # The history of each root, the most recently used root last. Calls with an optimizer and calls without an
        # optimizer have separate histories, because slime loads reference models into the model that it trains, but
        # without the optimizer.
        self._histories: dict[bool, dict[Path, RunHistory]] = {True: {}, False: {}}

    def attach(self, name: str, **how: Any) -> None:
        """Attaches a part to the manager, and to each manager that is made later. See CheckpointManager.attach."""
        if self.manager is not None:
            self.manager.attach(name, **how)
        self._parts[name] = how

    def _make(
        self, root: str | Path, trainer: Mapping[str, Any], config: CheckpointConfig, with_parts: bool = True
    ) -> CheckpointManager:
        manager = CheckpointManager(root, config=config, **trainer)
        for name, how in self._parts.items() if with_parts else ():
            manager.attach(name, **how)
        return manager

    def get(self, root: str | Path, trainer: Mapping[str, Any], config: CheckpointConfig) -> CheckpointManager:
        """Returns the manager for a root, a trainer's objects and options.

        `trainer` has the other arguments of CheckpointManager, by name. `trainer["model"]` is a list.

        Raises CheckpointError: see CheckpointManager; or a save of the previous manager failed, and no earlier call has
        raised its error.
        """
        # The objects stay alive as long as the manager does, so no other object can have the `id` of one of them.
        objects = [*trainer["model"], trainer.get("optimizer"), trainer.get("lr_scheduler")]
        made_for = (Path(root), trainer.get("role"), config, *map(id, objects))
        if self.manager is None or self._made_for != made_for:
            self.close()
            self.manager = self._make(root, trainer, config)
            self._made_for = made_for
        histories = self._histories[trainer.get("optimizer") is not None]
        last = next(reversed(histories.values()), None)
        before = histories.pop(self.manager.root, last)
        if before is not None and before is not self.manager.history:
            self.manager.history.go_on_from(before)
        histories[self.manager.root] = self.manager.history
        return self.manager

    @contextmanager
    def loader(
        self, root: str | Path, trainer: Mapping[str, Any], config: CheckpointConfig, with_parts: bool = True
    ) -> Iterator[CheckpointManager]:
        """Yields a separate manager for a load, and closes it. The next save goes on from the loaded step.

        Without `with_parts`, the parts of the loaded step are left out. The other arguments are as in `get`. Raises
        CheckpointError: see CheckpointManager.
        """
        manager = self._make(root, trainer, config, with_parts)
        try:
            yield manager
        finally:
            manager.close()
        trains = trainer.get("optimizer") is not None
        if trains:
            manager.history.hold()
        self._histories[trains] = {manager.root: manager.history}

    def wait(self) -> None:
        """Waits until no save is under way.

        Raises CheckpointError: a save failed, and no earlier call has raised its error.
        """
        if self.manager is not None:
            self.manager.wait()

    def close(self) -> None:
        """Waits as `wait` does, and frees the host memory that saves use. Further calls do nothing."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.close()
