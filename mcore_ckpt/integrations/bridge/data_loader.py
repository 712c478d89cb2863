"""Saves the state of Megatron-Bridge's data loader in the checkpoint, and hands the state to Bridge after a load.

Bridge itself writes the state next to its checkpoints, in files that can belong to another iteration than the weights.
The state is a pickle of Megatron Energon's classes, which Bridge reads without running other code
(`energon_torch_load`). This package stores the pickle's bytes and never unpickles them.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import megatron_dir
from mcore_ckpt.errors import CheckpointMismatchError

logger = logging.getLogger(__name__)

STATE = "bridge_data_loader"  # the key in the saved state
# The key of the state in Bridge's files, and the key of the state's folder in the context that `setup` reads (0.5 and
# newer).
_FIELD, CONTEXT_FIELD = "dataloader_state_dict", "dataloader_state_dir"


def read_state(iterator: Any, dp: tuple[int, int]) -> dict[str, Any] | None:
    """Returns the state of the loader under Bridge's RerunDataIterator; None if the loader has no state.

    `dp` is this rank's place in its data-parallel group, and the group's size.
    """
    iterable: Any = getattr(iterator, "iterable", None)
    if not hasattr(iterable, "save_state"):
        return None
    file = io.BytesIO()
    torch.save({_FIELD: iterable.save_state()}, file)
    return {"rank": dp[0], "size": dp[1], "file": file.getvalue()}


class Unsaved:
    """Warns once of data loaders whose state is not saved, because Bridge would not restore it.

    With virtual stages, Bridge 0.6 itself still has one iterator, which all stages of a rank share
    (`make_data_iterator_list`). There is a list only if the caller's own data provider, with
    `dataloader_type="external"`, returns a list of loaders. Each of these loaders has its own position, and Bridge
    restores no list (`maybe_load_dataloader_state`).
    """

    def __init__(self) -> None:
        self._has_warned = False

    def warn_of(self, iterator: Any) -> None:
        """Logs a warning if `iterator` is a list, and one of its loaders has a state. Later calls log nothing."""
        if self._has_warned or not isinstance(iterator, (list, tuple)):
            return
        count = sum(hasattr(getattr(each, "iterable", None), "save_state") for each in iterator)
        if count:
            self._has_warned = True
            logger.warning(
                "the checkpoints will not have the position in the training data, because the data provider returned a "
                "list of data loaders (%d, of which %d have a state), and Megatron-Bridge restores no list: return one "
                "data loader, which all virtual stages share, or restore the position yourself",
                *(len(iterator), count),
            )


class HandedOver:
    """The folder from which Bridge's `maybe_load_dataloader_state` reads the loaded state."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def write(self, state: Mapping[str, Any] | None, iteration: int, dp: tuple[int, int]) -> str | None:
        """Writes the state into a new folder and returns the folder; None if the checkpoint has no state.

        The folder exists until the next call of `write` or `remove`.

        Raises CheckpointMismatchError: the state belongs to another data-parallel rank or size.
        """
        self.remove()
        if state is None:
            return None
        if (state["rank"], state["size"]) != dp:
            raise CheckpointMismatchError(
                f"iteration {iteration} has the data loader's state of data-parallel rank {state['rank']} of "
                f"{state['size']}, but this is rank {dp[0]} of {dp[1]}, which would read other data: resume with the "
                'same data-parallel size, or set dataset.dataloader_load="" to begin the data anew'
            )
        self._folder = tempfile.TemporaryDirectory(prefix="mcore_ckpt_data_loader_")
        file = megatron_dir(Path(self._folder.name), iteration) / f"train_dataloader_dprank{dp[0]:03d}.pt"
        file.parent.mkdir()
        file.write_bytes(state["file"])
        return self._folder.name

    def remove(self) -> None:
        """Deletes the folder."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()
