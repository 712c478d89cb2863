"""Fixtures for the tests of files of a checkpoint."""

from tests.support.checkpoint_fixtures import small_knobs

__all__ = ["small_knobs"]
