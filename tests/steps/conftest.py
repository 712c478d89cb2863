"""Fixtures for the tests of steps."""

from tests.support.checkpoint_fixtures import dead_pid, role_dir, small_knobs

__all__ = ["dead_pid", "role_dir", "small_knobs"]
