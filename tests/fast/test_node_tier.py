"""What a node's folder has already, when the fast tier looks whether there is space for it."""

from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.fast.tier import _held_bytes


def test_what_saves_that_died_have_left_counts_as_space(tmp_path: Path) -> None:
    """Else a run could not start again where it has fitted until it died in a save."""
    attempt = "a" * 32
    for step, role in ((1, "actor"), (2, "actor"), (2, "critic")):
        role_dir = file_names.step_dir(tmp_path, step) / role
        for folder in (role_dir, file_names.staging_dir(role_dir, attempt), file_names.replaced_dir(role_dir, attempt)):
            (folder / "model").mkdir(parents=True)
            (folder / "model/0.pt").write_bytes(bytes(100 if role == "actor" else 7))
    (tmp_path / "notes").write_bytes(bytes(1000))
    assert _held_bytes(tmp_path, "actor") == 2 * 3 * 100
    assert _held_bytes(tmp_path, "critic") == 3 * 7
    assert _held_bytes(tmp_path / "none", "actor") == 0
