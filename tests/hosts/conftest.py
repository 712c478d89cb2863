"""The tests of this room train on simulated hosts."""

import pytest

pytestmark = pytest.mark.slow
