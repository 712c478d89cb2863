"""Fixtures for the tests of the fast tier."""

from checkpoint_fixtures import dead_pid, role_dir, small_knobs

__all__ = ["dead_pid", "role_dir", "small_knobs"]
