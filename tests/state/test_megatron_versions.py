"""Tests which versions of megatron-core are accepted, warned of and refused."""

import logging

import pytest
from megatron.core import __version__

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.state.megatron_versions import TESTED, check_megatron, check_version


def warnings_of(version: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    check_version.cache_clear()
    with caplog.at_level(logging.WARNING):
        check_version(version)
        check_version(version)
    return [record.getMessage() for record in caplog.records]


def test_the_installed_version_is_tested(caplog: pytest.LogCaptureFixture) -> None:
    check_version.cache_clear()
    check_megatron()
    assert not caplog.records
    assert __version__.startswith(tuple(f"{version}." for version in TESTED))


@pytest.mark.parametrize("version", ["0.16.0", "0.17.1", "0.18.2rc3", "0.19.0+local"])
def test_tested_versions_are_silent(version: str, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(version, caplog) == []


@pytest.mark.parametrize("version", ["0.20.0", "0.20.0rc1", "1.0.0", "0.190.0", "main"])
def test_another_version_is_named_in_one_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(version, caplog)
    assert warning.startswith(f"megatron-core {version} has not been tested with mcore_ckpt; versions 0.16 to 0.19")


@pytest.mark.parametrize("version", ["0.14.1", "0.9.0"])
def test_a_version_that_does_not_work_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"megatron-core {version} .*use one of the versions 0\.16 to 0\.19"):
        check_version(version)
