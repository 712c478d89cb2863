"""The order of the tests, which matters to nothing but the time they take together; and no test is of time."""

import hypothesis
import pytest

# Each example has 200 ms else, and making examples some seconds, which a busy machine takes for one that it is not.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The launches of several ranks first: begun last, they would run on alone long after all else had ended."""
    items.sort(key=lambda item: item.path.name != "test_distributed.py")
