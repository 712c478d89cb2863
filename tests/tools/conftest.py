"""Fixtures for the tests of the tools."""

from tests.support.checkpoint_fixtures import role_dir, small_knobs

__all__ = ["role_dir", "small_knobs"]
