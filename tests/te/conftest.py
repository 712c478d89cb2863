"""The tests of this room train with transformer-engine."""

import pytest

pytestmark = pytest.mark.slow
