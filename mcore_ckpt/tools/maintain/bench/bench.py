"""Runs a bench: measures below a root, predicts the saves of a training, and compares predictions with real saves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.amounts import size_text
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError, NoRoomError
from mcore_ckpt.io.disk_space import Need, space_of
from mcore_ckpt.io.mounts import Mount, mount_of
from mcore_ckpt.tools.examine.doctor.trial import trial_folder, unusable
from mcore_ckpt.tools.maintain.bench.predict import Prediction, predict
from mcore_ckpt.tools.maintain.bench.size import SaveSize
from mcore_ckpt.tools.maintain.bench.speeds import Speeds, alternate, free_memory, measure
from mcore_ckpt.tools.maintain.bench.trial_saves import TrialSaves

Progress = Callable[[str, int], None]
"""A function that is called with the name of the current work, and the number of bytes that were just saved."""

_REAL_SAVES = 5
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class Comparison:
    """A predicted and a measured time, in seconds."""

    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """The predicted time divided by the measured time."""
        return self.predicted_s / self.measured_s


@dataclass(frozen=True)
class RealSaves:
    """Real saves of one size, predicted and measured. The measured times are medians.

    `nbytes` is the size of a save in bytes, of all ranks of the node together. `async_save` is the time until an async
    save is durable.
    """

    nbytes: int
    stall: Comparison
    async_save: Comparison
    sync_save: Comparison


@dataclass(frozen=True)
class Report:
    """The result of a bench. `mount` is None if the file system is unknown.

    Attributes:
        size, prediction: the size of the training's saves, and how long they will take; None if no model was given.
        fitting_saves: how many saves of this size fit below the root; None if no model was given, or if unknown.
    """

    root: Path
    mount: Mount | None
    speeds: Speeds
    size: SaveSize | None
    prediction: Prediction | None
    fitting_saves: int | None
    real: tuple[RealSaves, ...]


def bench(
    root: Path,
    nbytes: int,
    ranks: int,
    size: SaveSize | None = None,
    real: Sequence[int] = (),
    progress: Progress = lambda what, nbytes: None,
) -> Report:
    """Measures in a hidden folder below an existing root. The folder is removed at the end.

    Args:
        nbytes: the size of a trial save in bytes.
        ranks: how many ranks of a node save at once.
        size: the size of the training's saves, for a prediction; None to predict nothing.
        real: the sizes, in bytes, of real saves to compare with their predictions.
        progress: called after each save.

    Raises:
        InvalidArgumentError: a size is too small, or larger than the memory allows.
        NoRoomError: there is too little space below the root.
        CheckpointError: checkpoints cannot be saved below the root.
    """
    for each in (nbytes, *real):
        _check_size(each)
    _check_space(root, 2 * max(nbytes, *real, 0))
    try:
        with trial_folder(root) as trial:
            speeds = measure(trial, nbytes, ranks, lambda done: progress("measuring", done))
            compared = tuple(_compare(trial, each, speeds, progress) for each in real)
    except CheckpointError:
        raise
    except (MemoryError, RuntimeError) as error:
        # torch raises RuntimeError if a GPU has no memory left or is broken.
        advice = "free memory, or use a smaller --megabytes"
        raise CheckpointError(f"{root}: measuring failed: {error}: {advice}") from error
    except OSError as error:
        finding = unusable(root, error)
        raise CheckpointError(f"{root}: {finding.fact}: {finding.advice}") from error
    prediction, fitting = (None, None) if size is None else (predict(size, speeds), _fitting(root, size))
    return Report(root, mount_of(root), speeds, size, prediction, fitting, compared)


def saved_bytes(nbytes: int, real: Sequence[int]) -> int:
    """Returns about how many bytes a bench saves, for a progress bar."""
    return 16 * nbytes + sum(2 * (_REAL_SAVES + 1) * each for each in real)


def _compare(trial: Path, nbytes: int, speeds: Speeds, progress: Progress) -> RealSaves:
    with TrialSaves(trial / f"real-{nbytes}", nbytes, speeds.ranks) as saves:
        predicted = predict(SaveSize.of_bytes(saves.nbytes, speeds.ranks), speeds)
        copied, in_place = alternate(saves, _REAL_SAVES, lambda done: progress("real saves", done))
        nbytes = saves.nbytes
    return RealSaves(
        nbytes,
        Comparison(predicted.stall.seconds, statistics.median(times.stall_s for times in copied)),
        Comparison(predicted.async_save.seconds, statistics.median(times.seconds for times in copied)),
        Comparison(predicted.sync_save.seconds, statistics.median(times.seconds for times in in_place)),
    )


def _fitting(root: Path, size: SaveSize) -> int | None:
    space = space_of(root)
    # Assume files of equal size. Besides the total size, only the number of files matters, because the end of each file
    # takes a whole block.
    per_file = -(-size.total_bytes // size.files)
    return space.times(space.taken_by(Need((per_file,) * size.files)))


def _check_size(nbytes: int) -> None:
    if nbytes < _LEAST_BYTES:
        raise InvalidArgumentError(f"a save of {nbytes} bytes is too small: use at least 1 MiB")
    free = free_memory()
    if free is not None and 2 * nbytes > free:
        raise InvalidArgumentError(
            f"a save of {size_text(nbytes)} needs twice as much memory, but {size_text(free)} are free: use a smaller "
            "size"
        )


def _check_space(root: Path, nbytes: int) -> None:
    space = space_of(root)
    amount = space.taken_by(Need((nbytes,)))
    limit = space.shortage(amount)
    if limit is not None and space.is_certain:
        raise NoRoomError(f"{root}: {limit.describe(amount)}: delete files, or use smaller sizes")
