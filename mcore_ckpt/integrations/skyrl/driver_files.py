"""Checks and reads the files that SkyRL's driver writes into a step, and remembers the metrics that SkyRL logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CommitError
from mcore_ckpt.integrations.kit.driver import finite_metrics
from mcore_ckpt.integrations.skyrl.options import DRIVER_ROLE
from mcore_ckpt.steps import RoleReader, step_status

logger = logging.getLogger(__name__)

_DATA_FILE = "data.pt"
STATE_FILE = "trainer_state.pt"


def check_files(files: Path, root: str) -> None:
    """Checks the driver's files, and puts the real path into the configuration that they hold.

    Raises CommitError: SkyRL could not save the state of the data loader. (SkyRL itself only logs this failure.)
    """
    try:
        # Both files may hold any object, but are safe to unpickle, because this process has just written them into a
        # folder that no other user may enter.
        torch.load(files / _DATA_FILE, weights_only=False)
    except Exception as error:  # of any type, because unpickling a half-written file can raise any error
        raise CommitError(
            "SkyRL could not save the state of the data loader (its log has the reason: Failed to save dataloader "
            "state), so the step does not count"
        ) from error
    state = torch.load(files / STATE_FILE, weights_only=False)
    state["config"]["trainer"]["ckpt_path"] = root
    torch.save(state, files / STATE_FILE)


def put_files(step_path: Path, folder: Path) -> None:
    """Copies the driver's files of a step into `folder`, and checks each file's size and CRC.

    Raises CheckpointCorruptError, CheckpointNotFoundError and OSError.
    """
    reader = RoleReader(step_status(step_path).role_dir(DRIVER_ROLE))
    for file in reader.manifest.files:
        (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
        reader.put(file.path, folder / file.path)


class LoggedMetrics:
    """Replaces SkyRL's tracker of metrics, and remembers the metrics that SkyRL logs.

    The fully asynchronous trainer forgets a step's metrics before it saves the step, so this object must remember them.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._step, self._metrics = -1, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    def log(self, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any) -> Any:
        self._metrics = {**(self._metrics if step == self._step else {}), **data}
        self._step = step
        return self._tracker.log(data, step, *args, **kwargs)

    def of_step(self, step: int, pending: Mapping[str, Any], wanted: set[str]) -> dict[str, float]:
        """Returns the wanted metrics of a step, and warns of missing metrics. `pending` has metrics not logged yet."""
        metrics = {**(self._metrics if step == self._step else {}), **pending}
        found = finite_metrics(metrics, wanted)
        if missing := sorted(wanted - found.keys()):
            logger.warning("step %d has no metric %s, so keep_best never keeps it", step, ", ".join(missing))
        return found
