"""What a checkpoint says of its place among all commits."""

from pathlib import Path

from mcore_ckpt.checkpoint.provenance import Commit, Ranges, RunParent
from mcore_ckpt.checkpoint.reading import read_manifest


def commit_in(role_dir: Path) -> Commit:
    """Its commit."""
    commit = read_manifest(role_dir).commit
    assert commit is not None
    return commit


def branch_in(role_dir: Path) -> Ranges:
    """The numbers that led to it: one pair if no step was given up."""
    return commit_in(role_dir).branch


def came_from(role_dir: Path, before: Path) -> bool:
    """True if the training had loaded or saved another checkpoint of its own last."""
    commit, number = commit_in(role_dir), commit_in(before).number
    is_led = any(first <= number <= last for first, last in commit.branch)
    return is_led and commit.parent == read_manifest(before).attempt


def is_fork_of(role_dir: Path, before: Path) -> bool:
    """True if the run began with a checkpoint of another run."""
    run, other = read_manifest(role_dir).run, read_manifest(before).run
    assert run is not None
    assert other is not None
    return run.id != other.id and run.parent == RunParent(other.id, read_manifest(before).step)
