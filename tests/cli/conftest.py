"""Fixtures for the tests of the commands."""

from checkpoint_fixtures import dead_pid

__all__ = ["dead_pid"]
