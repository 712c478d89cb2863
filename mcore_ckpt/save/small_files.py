"""Reads and writes the small part of a training state, and writes the HuggingFace assets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.checkpoint.plain_files import check_plain, pickle_unchecked, write_plain
from mcore_ckpt.formats.huggingface.assets import save_assets
from mcore_ckpt.formats.huggingface.side_files import written_side_files
from mcore_ckpt.sharding.stored_positions import digests_of
from mcore_ckpt.state import optimizer as optimizer_state
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import read_step
from mcore_ckpt.state.param_groups import read_param_groups
from mcore_ckpt.state.rng import read_rng
from mcore_ckpt.state.scheduler import read_scheduler
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.state.typed_values import to_stored


class SmallFiles:
    """This rank's small files, with the state as it was when the save was requested.

    `contents` is what the checkpoint will have (`Destination.contents`). Raises UnsupportedError if a value cannot be
    stored without pickling a class.

    Attributes:
        common: the state that all ranks share (`read_common`), on rank 0. Rank 0 writes this state at the commit.
        positions: digests of the data positions in `extra_state`, by name.
    """

    def __init__(self, trainer: Trainer, extra_state: Mapping[str, Any] | None, contents: Sequence[str]) -> None:
        self._trainer, self._contents = trainer, contents
        self._files = dict(_pickled(trainer, extra_state))
        self.positions = digests_of(extra_state)
        shares = "optimizer" in trainer.config.save_contents and trainer.agreement.is_coordinator
        self.common: dict[str, Any] = read_common(trainer) if shares else {}

    def read_rng_again(self) -> None:
        """Reads the random states again, and replaces the states that were read before."""
        self._files |= dict(_pickled_rng(self._trainer))

    def sizes(self) -> dict[str, int]:
        """Returns the sizes in bytes of the small files, by path.

        The optimizers' steps are not in `common` yet, but they add only a few bytes to `common.pt`.
        """
        sizes = {path: len(data) for path, (_, data) in self._files.items()}
        return sizes | ({file_names.COMMON_FILE: len(pickle_unchecked(self.common))} if self.common else {})

    def write(self, staging: Path) -> list[WrittenFile]:
        """Checks and writes the files. On rank 0, a save that exports no model also writes the assets."""
        written = [write_plain(staging, path, kind, check_plain(data)) for path, (kind, data) in self._files.items()]
        if self._trainer.agreement.is_coordinator and "hf_model" not in self._contents:
            written += _write_assets(self._trainer, staging)
        return written


def _pickled(trainer: Trainer, extra_state: Mapping[str, Any] | None) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """Yields each small file of this rank: its path, its kind and its bytes, which are not checked yet."""
    yield from _pickled_rng(trainer)
    if extra_state is not None:
        path = file_names.extra_file(*trainer.coordinates.place)
        yield path, ("extra", pickle_unchecked(to_stored(extra_state, "extra_state")))


def _pickled_rng(trainer: Trainer) -> Iterator[tuple[str, tuple[str, bytes]]]:
    if "extra" in trainer.config.save_contents:
        yield file_names.rng_file(*trainer.coordinates.place), ("rng", pickle_unchecked(read_rng()))


def read_common(trainer: Trainer) -> dict[str, Any]:
    """Returns the optimizer and scheduler state that all ranks share.

    The optimizers' steps and the members of their groups are left out, because rank 0 may not know them.
    """
    return {
        "optimizers": [
            {
                "kind": part.kind_name,
                "param_groups": read_param_groups(part),
                "grad_scaler": optimizer_state.read_grad_scaler(part),
            }
            for part in optimizer_parts(trainer.optimizer)
        ],
        "lr_scheduler": read_scheduler(trainer.lr_scheduler),
    }


def read_steps(trainer: Trainer) -> list[float | int | None]:
    """Returns how many steps each chained optimizer has done.

    Raises UnsupportedError if the parameters of one optimizer have done different numbers of steps.
    """
    if "optimizer" not in trainer.config.save_contents:
        return []
    return [read_step(part) for part in optimizer_parts(trainer.optimizer)]


def _write_assets(trainer: Trainer, staging: Path) -> list[WrittenFile]:
    folder = staging / file_names.HUGGINGFACE_DIR
    return written_side_files(
        folder, save_assets(folder, trainer.hf_config, trainer.processing_class, trainer.source_files)
    )


def sizes_of_assets(written: Sequence[WrittenFile]) -> dict[str, int]:
    """Returns the sizes in bytes of the HuggingFace assets, by path."""
    # Leave out the files of exported weights, which have the same `kind`, because each save plans them anew.
    assets = (file for file in written if file.kind == "huggingface")
    return {file.path: file.size for file in assets if not file.path.endswith(".safetensors")}
