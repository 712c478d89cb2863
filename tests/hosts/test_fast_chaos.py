"""A small part of what scripts/fast_chaos.sh does, and that its judge finds what is lost or torn."""

from pathlib import Path

import pytest

from tests.hosts.fast_chaos import Chain, Claim, Oracle, line_of
from tests.support.host_jobs import JobServer


# With seed 534, the processes of a host die in a save, and a host is lost while a step goes to the root.
@pytest.mark.full
@pytest.mark.parametrize(("kills", "seed"), [(2, "534"), (12, "6")])
def test_random_kills(kills: int, seed: str, tmp_path: Path, job_server: JobServer) -> None:
    for outcome in Chain(seed, tmp_path, job_server).run(kills):
        assert not outcome.problems, line_of(outcome)


def told(kind: str, step: int, replicas: int = 1) -> Claim:
    return Claim(life=step, step=step, kind=kind, replicas=replicas)


def oracle_of(*claims: Claim) -> Oracle:
    oracle = Oracle()
    for claim in claims:
        oracle.note_saved(claim.life, claim.step, f"state {claim.step}")
        oracle.note_told(claim)
    return oracle


def test_a_lost_host_takes_what_has_no_copies() -> None:
    oracle = oracle_of(told("durable", 1), told("copied", 2), told("copied", 3, replicas=2), told("committed", 4))
    wanted = [oracle.wanted]
    for _ in range(3):
        oracle.note_lost_host()
        wanted.append(oracle.wanted)
    assert wanted == [4, 3, 3, 1]


def test_a_newer_step_takes_the_place_of_one_with_more_copies() -> None:
    """A life with two copies is followed by one with one copy, which keeps its own steps."""
    oracle = oracle_of(told("durable", 1), told("copied", 2, replicas=2), told("copied", 3))
    oracle.note_lost_host()
    assert oracle.wanted == 3
    oracle.note_lost_host()
    assert oracle.wanted == 1


def test_a_lost_step_and_a_torn_one_are_found() -> None:
    assert oracle_of(told("committed", 1), told("committed", 2)).note_loaded(2, {"state 2"}) == []
    assert "lost" in oracle_of(told("committed", 1), told("committed", 2)).note_loaded(1, {"state 1"})[0]
    assert "torn" in oracle_of(told("committed", 1)).note_loaded(1, {"state 1", "another state"})[0]


def test_the_state_of_a_training_that_was_given_up_is_a_torn_one() -> None:
    oracle = oracle_of(told("committed", 1))
    oracle.note_saved(7, 1, "state of life 7")
    assert oracle.note_loaded(1, {"state 1"}) == []
    oracle.note_told(Claim(life=7, step=1, kind="committed", replicas=1))
    assert "torn" in oracle.note_loaded(1, {"state 1"})[0]
