"""The tests of this room start trainings and kill them."""

import pytest

pytestmark = pytest.mark.slow
