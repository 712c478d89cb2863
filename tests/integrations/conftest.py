"""The tests of this room train, or import frameworks."""

import pytest

pytestmark = pytest.mark.slow
