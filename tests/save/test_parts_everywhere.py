"""Parts of a step are treated as its other files: by the commands, the remote store, the fast tier and `recover`."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig, CheckpointManager, SavedPart
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.cli.main import main
from mcore_ckpt.config import FastTier
from mcore_ckpt.recover import recover
from mcore_ckpt.tools.convert.for_trainers.shared_state import parts_left_out
from mcore_ckpt.tools.examine.verify import verify
from tests.support.unsharded_model import Model
from tests.support.waiting import LONG_S

WORDS = ("model", "extra")
FILES = {"a": b"first", "below/b": b"second" * 1000}


def write(folder: Path) -> None:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def files_in(part: SavedPart) -> dict[str, bytes]:
    folder = part.folder()
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def manager_of(root: Path, role: str = "actor", **config: Any) -> CheckpointManager:
    words = CheckpointConfig(save_contents=WORDS, load_contents=WORDS, timeout_s=20.0, **config)
    return CheckpointManager(root, Model(), role=role, config=words)


def save(root: Path, *steps: int, role: str = "actor", **config: Any) -> None:
    with closing(manager_of(root, role, **config)) as manager:
        manager.attach("buffer", save=write)
        manager.attach("cursor", save=b"12")
        for step in steps:
            manager.save(step).wait(LONG_S)
        manager.wait()


def loaded(load: Callable[[CheckpointManager], Any], root: Path, **config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with closing(manager_of(root, **config)) as manager:
        manager.attach("buffer", load=lambda part: found.update(files=files_in(part), step=part.step))
        manager.attach("cursor", load=lambda part: found.update(cursor=part.read()))
        load(manager)
    return found


def role_dir(root: Path, step: int) -> Path:
    return root / f"global_steps_{step}" / "actor"


def test_commands_show_parts_and_find_damage_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    size = sum(map(len, FILES.values()))
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"part buffer: 2 files, {size / 1000:.1f} KB, of rank 0" in text or "part buffer: 2 files, " in text
    assert "part cursor: 1 files, 2 B, of rank 0" in text
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    role = json.loads(capsys.readouterr().out)["roles"][0]
    assert role["parts"] == [
        {"name": "buffer", "ranks": [[0, 0]], "files": 2, "bytes": size},
        {"name": "cursor", "ranks": [[0, 0]], "files": 1, "bytes": 2},
    ]
    assert main(["list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["bytes"] == role["bytes"] > size
    path = role_dir(tmp_path, 1) / "parts/buffer/rank_00000/below/b"
    path.write_bytes(b"s" + path.read_bytes()[1:-1] + b"x")
    (damage,) = [damage for verdict in verify(tmp_path).roles for damage in verdict.damages]
    assert (damage.file, damage.rank) == ("parts/buffer/rank_00000/below/b", 0)
    path.unlink()
    assert not verify(tmp_path).is_sound


def test_diff_names_files_of_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(manager_of(tmp_path)) as manager:
        for step in (1, 2):
            manager.attach("cursor", save=b"%d" % step)
            manager.save(step).wait(LONG_S)
            manager.detach("cursor")
    main(["diff", str(tmp_path / "global_steps_1"), str(tmp_path / "global_steps_2")])
    assert "parts/cursor/rank_00000/data" in capsys.readouterr().out


def test_parts_come_back_from_the_remote_store(tmp_path: Path) -> None:
    root, remote = tmp_path / "root", f"file://{tmp_path}/remote"
    save(root, 1, remote=remote)
    shutil.rmtree(root)
    found = loaded(lambda manager: manager.load(), root, remote=remote)
    assert found == {"files": FILES, "step": 1, "cursor": b"12"}


def test_parts_of_the_fast_tier_and_of_the_root_after_it(tmp_path: Path) -> None:
    root, fast = tmp_path / "root", FastTier(tmp_path / "node", replicas=0, durable_every=2)
    save(root, 1, 2, 3, fast=fast)
    assert loaded(lambda manager: manager.load(), root, fast=fast) == {"files": FILES, "step": 3, "cursor": b"12"}
    assert verify(root).is_sound
    shutil.rmtree(tmp_path / "node")
    assert loaded(lambda manager: manager.load(), root, fast=fast)["files"] == FILES


def test_collect_takes_parts_along(tmp_path: Path) -> None:
    root, fast = tmp_path / "root", FastTier(tmp_path / "node", replicas=0, durable_every=None)
    save(root, 3, fast=fast)
    assert main(["collect", str(tmp_path / "node"), str(tmp_path / "out")]) == 0
    assert loaded(lambda manager: manager.load(), tmp_path / "out")["files"] == FILES


def test_retention_deletes_parts_with_their_step(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, max_to_keep=1)
    assert [path.parts[-5] for path in tmp_path.rglob("cursor/rank_00000")] == ["global_steps_3"]


def test_recover_loads_the_parts_of_each_role_of_one_step(tmp_path: Path) -> None:
    roles = ("actor", "critic")
    for role in roles:
        save(tmp_path, 1, role=role, roles=roles)
    save(tmp_path, 2, role="actor", roles=roles)  # the critic died before it
    steps: list[int] = []
    managers = [manager_of(tmp_path, role, roles=roles) for role in roles]
    for manager in managers:
        manager.attach("buffer", load=lambda part: steps.append(part.step))
    recover(managers)
    assert steps == [1, 1]
    for manager in managers:
        manager.close()


def test_a_trainer_of_another_kind_is_told_what_it_does_not_get(tmp_path: Path) -> None:
    save(tmp_path, 1)
    reader: Any = SimpleNamespace(manifest=read_manifest(role_dir(tmp_path, 1)), place="there")
    assert parts_left_out(reader) == (
        "the parts of the step (buffer, cursor) are not converted: they stay in there/parts"
    )
