"""Three small parts of a step, for ranks without a model: of one rank, of each rank, and a folder to hand over."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.io.files import sync_names
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.save.part_files import PartFiles
from mcore_ckpt.state.attached_parts import AttachedParts, Content, HandOver, part_of
from mcore_ckpt.steps.transaction import Attempt

Files = dict[str, bytes]

GIVEN = ("a", "below/b")


def _data(version: int, name: str) -> bytes:
    return f"{name} of version {version}, ".encode() * 500


def given_folder(above: Path, version: int) -> Path:
    """The folder that rank 0 hands over with a version."""
    return above / f"given-{version}"


def make_given(above: Path, versions: Iterable[int]) -> None:
    """Makes the folders that will be handed over. To be called before a rank may die."""
    for version in versions:
        for name in GIVEN:
            path = given_folder(above, version) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_data(version, name))


def given_files(version: int) -> Files:
    """What is in the folder that is handed over with a version."""
    return {name: _data(version, name) for name in GIVEN}


class RankParts:
    """The parts of one rank in one save."""

    def __init__(self, agreement: Agreement, root: Path, version: int) -> None:
        attached = AttachedParts()
        if agreement.rank == 0:
            attached.attach(part_of("counter", _data(version, "counter"), None, False))
            given = HandOver(given_folder(root.parent, version))
            attached.attach(part_of("rollouts", lambda folder: given, None, False))
        attached.attach(part_of("prompts", _writing(version, agreement.rank), None, False))
        config = SimpleNamespace(timeout_s=agreement.timeout_s, async_save=False)
        trainer = SimpleNamespace(parts=attached, agreement=agreement, root=root, config=config, gpu=None)
        self._files = PartFiles(trainer, agreement.runner, {}, [])  # type: ignore[arg-type]

    def capture(self, attempt: Attempt) -> None:
        self._files.capture(attempt)

    def write(self, staging: Path) -> list[WrittenFile]:
        self._files.start(staging)
        written = self._files.finish()
        sync_names(staging, [file.path for file in written])
        return written

    def committed(self) -> None:
        self._files.committed()
        self._files.close()


def _writing(version: int, rank: int) -> Callable[[Path], Content]:
    def early(folder: Path) -> Callable[[], None]:
        (folder / "early").write_bytes(_data(version, f"early {rank}"))
        return lambda: late(folder)

    def late(folder: Path) -> None:
        (folder / "late").write_bytes(_data(version, f"late {rank}"))

    return early


def assert_parts(role_dir: Path, version: int, world: int) -> None:
    """A checkpoint has all three parts of a version, and nothing else where parts are."""
    wanted = {f"{file_names.part_dir('counter', 0)}/{file_names.PART_FILE}": _data(version, "counter")}
    wanted |= {f"{file_names.part_dir('rollouts', 0)}/{name}": data for name, data in given_files(version).items()}
    for rank in range(world):
        folder = file_names.part_dir("prompts", rank)
        wanted |= {f"{folder}/{name}": _data(version, f"{name} {rank}") for name in ("early", "late")}
    found = files_below(role_dir / file_names.PARTS_DIR)
    assert {f"{file_names.PARTS_DIR}/{path}": data for path, data in found.items()} == wanted
    manifest = read_manifest(role_dir)
    assert {file.path for file in manifest.files_of("part")} == wanted.keys()
    assert manifest.parts == {"counter": [(0, 0)], "prompts": [(0, world - 1)], "rollouts": [(0, 0)]}


def files_below(folder: Path) -> Files:
    """All files below a folder, by path; none if there is no such folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
