"""What changes the state is called after what makes it wait, as long as the guards are there and no longer."""

import copy
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_ckpt.save.guards import Guards


class Trainer:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def step(self, *args: int, by: int = 0) -> int:
        self.calls.append(("step", args, by))
        return sum(args) + by

    def load(self) -> None:
        self.calls.append("load")


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def guard(trainer: Trainer, *names: str, word: str = "before") -> Guards:
    return Guards([(trainer, name) for name in names], lambda: trainer.calls.append(word))


def wrap(trainer: Trainer, word: str, wraps: bool = True) -> Callable[..., int]:
    """Somebody else's wrapper, as torch's schedulers put one on `step`."""
    inner = trainer.step

    def outer(*args: int, **kwargs: int) -> int:
        trainer.calls.append(word)
        return inner(*args, **kwargs)

    wrapper = functools.wraps(inner)(outer) if wraps else outer
    trainer.step = wrapper  # type: ignore[method-assign]
    return wrapper


def test_before_comes_before_each_call_and_the_call_is_what_it_was(trainer: Trainer) -> None:
    guard(trainer, "step", "load")
    assert trainer.step(1, 2, by=3) == 6
    trainer.load()
    assert trainer.calls == ["before", ("step", (1, 2), 3), "before", "load"]
    assert trainer.step.__name__ == "step"


def test_an_error_before_keeps_the_change_from_happening(trainer: Trainer) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    Guards([(trainer, "step")], fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        trainer.step(1)
    assert trainer.calls == []


def test_other_objects_of_the_class_are_not_guarded(trainer: Trainer) -> None:
    guard(trainer, "step")
    other = Trainer()
    other.step()
    assert other.calls == [("step", (), 0)]
    assert trainer.calls == []


def test_what_an_object_does_not_have_is_passed_over(trainer: Trainer) -> None:
    guards = guard(trainer, "no_such_method", "load")
    trainer.load()
    guards.remove()
    assert trainer.calls == ["before", "load"]
    assert not hasattr(trainer, "no_such_method")


def test_removed_guards_leave_the_object_as_it_was(trainer: Trainer) -> None:
    before = dict(vars(trainer))
    guards = guard(trainer, "step", "load")
    guards.remove()
    assert vars(trainer) == before
    trainer.step()
    assert trainer.calls == [("step", (), 0)]
    guards.remove()
    assert vars(trainer) == before


@pytest.mark.parametrize("wraps", [True, False])
def test_a_wrapper_that_was_there_before_is_put_back(trainer: Trainer, wraps: bool) -> None:
    wrapper = wrap(trainer, "other", wraps)
    guards = guard(trainer, "step")
    trainer.step()
    assert trainer.calls == ["before", "other", ("step", (), 0)]
    guards.remove()
    assert trainer.step is wrapper


def test_a_method_of_the_object_s_own_is_put_back(trainer: Trainer) -> None:
    """Bound to it as its class's are, but not its class's."""

    def special(self: Trainer) -> str:
        return "special"

    trainer.load = types.MethodType(special, trainer)  # type: ignore[method-assign]
    guards = guard(trainer, "load")
    assert trainer.load() == "special"  # type: ignore[func-returns-value]
    guards.remove()
    assert trainer.load() == "special"  # type: ignore[func-returns-value]


@pytest.mark.parametrize("wraps", [True, False])
def test_a_wrapper_that_came_later_survives_and_nothing_waits_any_more(trainer: Trainer, wraps: bool) -> None:
    guards = guard(trainer, "step")
    wrapper = wrap(trainer, "later", wraps)
    trainer.step()
    assert trainer.calls == ["later", "before", ("step", (), 0)]
    guards.remove()
    trainer.calls.clear()
    assert trainer.step is wrapper
    trainer.step()
    assert trainer.calls == ["later", ("step", (), 0)]


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_two_managers_of_one_trainer_guard_it_each_as_long_as_it_lives(trainer: Trainer, first_to_go: int) -> None:
    guards = [guard(trainer, "step", word=word) for word in ("first", "second")]
    trainer.step()
    assert trainer.calls == ["second", "first", ("step", (), 0)]
    trainer.calls.clear()
    guards[first_to_go].remove()
    trainer.step()
    assert trainer.calls == [("second", "first")[first_to_go], ("step", (), 0)]
    trainer.calls.clear()
    guards[1 - first_to_go].remove()
    trainer.step()
    assert trainer.calls == [("step", (), 0)]


def test_a_copy_of_a_guarded_object_is_its_own() -> None:
    """A trainer deep-copies its model for a reference policy: the copy must not load into the original."""
    model, calls = torch.nn.Linear(2, 2), []
    guards = Guards([(model, "load_state_dict")], lambda: calls.append("waited"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = model.weight.detach().clone()
        copied.load_state_dict({name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()})
        assert torch.equal(model.weight, before)
        assert bool((copied.weight == 7.0).all())
    assert calls == []
    model.load_state_dict(model.state_dict())
    assert calls == ["waited"]
    guards.remove()
    assert "load_state_dict" not in vars(model)
