"""Fixtures for the tests of the modules that a trainer calls."""

from checkpoint_fixtures import small_knobs

__all__ = ["small_knobs"]
