"""The kinds of state that torch-like optimizers keep: which tensors, of which shapes, and where the step is.

Classes are recognized by name, because they may be in packages that are not installed (transformer-engine,
emerging-optimizers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]


def _none(inner: Any, shape: tuple[int, ...]) -> Shapes:
    return {}


@dataclass(frozen=True)
class OptimizerKind:
    """A kind of state.

    Attributes:
        name: the kind's name in checkpoints.
        classes: the classes of optimizers that keep this state. Derived classes keep this state, too.
        moments: the tensors that have one element per element of a parameter, and can be divided as the parameter is.
        optional: moments that only some settings add.
        bound: a function that returns, by kind, the shapes of the tensors that belong to a rank's whole part of a
            parameter. If the parameter is divided in another way, these tensors cannot be divided in the same way. The
            arguments of the function are the optimizer and the shape of the rank's part.
        has_step: whether an optimizer with this state counts steps.
        step_is_int: whether the step in the state is a number, and not a tensor.
    """

    name: str
    classes: tuple[str, ...]
    moments: tuple[str, ...]
    optional: tuple[str, ...] = ()
    bound: Callable[[Any, tuple[int, ...]], Shapes] = _none
    has_step: bool = False
    step_is_int: bool = False


def _bound_of_adaptive_muon(inner: Any, shape: tuple[int, ...]) -> Shapes:
    # The shapes of `AdaptiveMuon._init_group` (emerging-optimizers 0.3.0). The average along the longer axis covers
    # only this rank's part of that axis, so the tensor fits only this part.
    if inner.moment2_method == "adamuon":
        return {}
    if inner.moment2_method == "namo":
        return {"moment2_buffer": (1,)}
    rows, columns = shape
    return {"moment2_buffer": (rows, 1) if rows >= columns else (1, columns)}


def _bound_of_soap(inner: Any, shape: tuple[int, ...]) -> Shapes:
    # The moments are in the coordinates of the eigenbases `Q_L` and `Q_R`, which belong to this rank's part. So the
    # moments fit only this part, too.
    rows, columns = shape
    left, right = (rows, rows), (columns, columns)
    return {"exp_avg": shape, "exp_avg_sq": shape, "L": left, "R": right, "Q_L": left, "Q_R": right}


_ADAM = ("exp_avg", "exp_avg_sq")
KINDS = (
    OptimizerKind("Adam", ("Adam", "AdamW", "FusedAdam"), _ADAM, optional=("max_exp_avg_sq",), has_step=True),
    OptimizerKind("SGD", ("SGD",), ("momentum_buffer",)),
    OptimizerKind("FusedSGD", ("FusedSGD",), ("momentum_buffer",)),
    OptimizerKind("Lion", ("Lion",), ("exp_avg",)),
    OptimizerKind(
        "AdaptiveMuon",
        ("AdaptiveMuon", "TensorParallelAdaptiveMuon"),
        ("momentum_buffer", "moment2_buffer"),
        bound=_bound_of_adaptive_muon,
    ),
    OptimizerKind("Muon", ("Muon", "TensorParallelMuon"), ("momentum_buffer",)),
    OptimizerKind("SOAP", ("SOAP",), (), bound=_bound_of_soap, has_step=True, step_is_int=True),
)


def find_kind(inner: Any) -> OptimizerKind | None:
    """Returns the kind of a torch-like optimizer, or None if its class is not known."""
    return _kind_of(type(inner))


def kind_name(inner: Any) -> str:
    """Returns the name that checkpoints have for an optimizer's kind of state."""
    return kind_name_of(type(inner))


def kind_name_of(cls: type) -> str:
    """Returns the name that checkpoints have for the kind of state that a class of optimizers keeps.

    A class that is derived from a known class has its own name, because its state may have another meaning.
    """
    kind = _kind_of(cls)
    return kind.name if kind is not None and cls.__name__ in kind.classes else cls.__name__


def _kind_of(cls: type) -> OptimizerKind | None:
    return next((kind for base in cls.__mro__ for kind in KINDS if base.__name__ in kind.classes), None)
