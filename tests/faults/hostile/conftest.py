"""The tests of this room read many hostile files."""

import pytest

pytestmark = pytest.mark.slow
