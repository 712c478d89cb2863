"""Three parts of a step, each with the step's number in all of its bytes: bytes, a folder, and one of each rank."""

from pathlib import Path
from typing import Any

from mcore_ckpt import CheckpointManager, HandOver, SavedPart


class PartsOfStep:
    """What a trainer has beside its model.

    Args:
        manager: gets the parts.
        rank: this rank.
        work: a folder in which this rank makes what it hands over.
        repeats: how often the number of the step is in each file. The default makes files of some calls.
        folder_repeats: the same for the files of the folder; None: as often as in the others.

    Attributes:
        step: the step that the parts are of: set it before a save, and compare it after a load.
    """

    NAMES = ("counter", "rollouts", "prompts")

    FILES = ("a", "below/b", "below/c")  # of the folder

    def __init__(
        self,
        manager: CheckpointManager,
        rank: int,
        work: Path,
        repeats: int = 20_000,
        folder_repeats: int | None = None,
    ) -> None:
        self.step, self._rank, self._work, self._repeats = 0, rank, work, repeats
        self._folder_repeats = repeats if folder_repeats is None else folder_repeats
        self._seen: dict[str, int] = {}
        if rank == 0:
            manager.attach("counter", save=lambda folder: self._data(), load=self._load_bytes)
            manager.attach("rollouts", save=lambda folder: HandOver(self._folder()), load=self._load_folder)
        manager.attach("prompts", save=self._write, load=self._load_folder)

    def _data(self) -> bytes:
        return b"%08d" % self.step * self._repeats

    def _folder(self) -> Path:
        folder = self._work / f"rollouts-{self.step}"
        (folder / "below").mkdir(parents=True, exist_ok=True)
        for name in self.FILES:
            (folder / name).write_bytes(b"%08d" % self.step * self._folder_repeats)
        return folder

    def _write(self, folder: Path) -> Any:
        (folder / "early").write_bytes(self._data())
        step, data = self.step, self._data()

        def later() -> None:
            (folder / f"late-{step}").write_bytes(data)

        return later

    def _load_bytes(self, part: SavedPart) -> None:
        self._note(part, [part.read()])

    def _load_folder(self, part: SavedPart) -> None:
        self._note(part, [path.read_bytes() for path in part.folder().rglob("*") if path.is_file()])

    def _note(self, part: SavedPart, files: list[bytes]) -> None:
        repeats = self._folder_repeats if part.name == "rollouts" else self._repeats
        assert set(files) == {b"%08d" % part.step * repeats}, f"{part.name} of step {part.step}"
        self._seen[part.name] = part.step

    def check_loaded(self, step: int) -> None:
        """Fails unless the last load has brought all parts of this step."""
        names = self.NAMES if self._rank == 0 else ("prompts",)
        assert self._seen == dict.fromkeys(names, step), f"rank {self._rank}: step {step}, but parts {self._seen}"
        self._seen = {}
