"""The address of this node: of the interface that gloo uses, or of the one that leads to rank 0."""

import socket

import pytest

from mcore_ckpt.errors import InvalidStateError
from mcore_ckpt.ranks.addresses import own_address


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_a_job_of_one_host_stays_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert own_address() in ("127.0.0.1", "::1")


def test_the_way_to_rank_0_chooses_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")  # the loopback has all of 127.0.0.0/8, and answers from .1
    found = own_address()
    assert found.startswith("127.")
    with socket.create_server((found, 0)) as server:  # it is an address of this host
        assert server.getsockname()[0] == found


@pytest.mark.parametrize("value", ["lo", "lo,eth9", "=lo"])
def test_the_interface_of_gloo_comes_first(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    assert own_address() == "127.0.0.1"


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(InvalidStateError, match=r"GLOO_SOCKET_IFNAME=nosuch0: .* no IPv4 address .*use one of .*lo"):
        own_address()


def test_no_way_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(InvalidStateError, match=r"no way to MASTER_ADDR=no-such-host\.invalid .*GLOO_SOCKET_IFNAME"):
        own_address()
