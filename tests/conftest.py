"""The order of the tests, which matters to nothing but the time they take together."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The launches of several ranks first: begun last, they would run on alone long after all else had ended."""
    items.sort(key=lambda item: item.path.name != "test_distributed.py")
