"""What a function of the trainer raises becomes an error of the package, but for interrupts."""

import signal

import pytest

from mcore_ckpt.errors import CheckpointError, CommitError, InvalidArgumentError
from mcore_ckpt.state.trainer_functions import call_of_trainer


def test_a_result_comes_back() -> None:
    assert call_of_trainer(lambda: 7, "it failed", CommitError) == 7


@pytest.mark.parametrize("error_type", [CommitError, CheckpointError])
def test_an_error_becomes_one_of_the_package(error_type: type[CheckpointError]) -> None:
    with pytest.raises(error_type, match=r"^it failed: KeyError: 'buffer'$") as raised:
        call_of_trainer(lambda: {}["buffer"], "it failed", error_type)
    assert type(raised.value) is error_type
    assert isinstance(raised.value.__cause__, KeyError)


def test_errors_of_the_package_stay() -> None:
    def refuses() -> None:
        raise InvalidArgumentError("too small")

    with pytest.raises(InvalidArgumentError, match=r"^too small$"):
        call_of_trainer(refuses, "it failed", CommitError)


def test_what_a_signal_handler_raises_stays() -> None:
    def handler(*_: object) -> None:
        raise TimeoutError("preempted")

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(TimeoutError, match=r"^preempted$"):
            call_of_trainer(lambda: signal.raise_signal(signal.SIGUSR2), "it failed", CommitError)
    finally:
        signal.signal(signal.SIGUSR2, before)
