"""Fixtures for the tests of the modules that a trainer calls."""

from tests.support.checkpoint_fixtures import small_knobs

__all__ = ["small_knobs"]
