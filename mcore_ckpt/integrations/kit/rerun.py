"""Translates the state of megatron-core's rerun state machine (0.16.1) into plain values and back.

The machine's `state_dict` has enums and named tuples, which `torch.load(weights_only=True)` refuses to open.
"""

from __future__ import annotations

from typing import Any

from megatron.core import rerun_state_machine as machines

# The classes of named tuples, by the names under which they are stored. Their fields are plain values.
_TUPLES = {"Caller": machines.Caller, "Call": machines.Call}
_ENUMS = {
    "RerunMode": machines.RerunMode,
    "RerunState": machines.RerunState,
    "RerunDiagnostic": machines.RerunDiagnostic,
}
_TAG = "class of megatron.core.rerun_state_machine"


def read_rerun_state(data_iterator: Any) -> Any:
    """Returns the state of a step that is to be run again; None if there is no such step (the usual case).

    Args:
        data_iterator: the training's data iterator, or a list with one iterator for each virtual stage.
    """
    # If there is no machine yet, get_rerun_state_machine would make one and log that it did.
    if machines._GLOBAL_RERUN_STATE_MACHINE is None:
        return None
    # torch_dist is the only one of Megatron's formats for which `state_dict` returns a state.
    state = machines.get_rerun_state_machine().state_dict(data_iterator=data_iterator, ckpt_format="torch_dist")
    return None if state is None else _encode({**state, "sharded": state["sharded"].data})


def write_rerun_state(state: Any) -> None:
    """Restores the state. A machine that is switched off (the default) ignores the state and logs that it does."""
    machines.get_rerun_state_machine().load_state_dict(_decode(state))


def _encode(value: Any) -> Any:
    name = type(value).__name__
    if type(value) is _ENUMS.get(name):
        return {_TAG: name, "value": value.value}
    if type(value) is _TUPLES.get(name):
        return {_TAG: name, "value": [_encode(item) for item in value]}
    if type(value) is dict:
        return {key: _encode(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_encode(item) for item in value)
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict) and _TAG in value:
        name, inner = value[_TAG], _decode(value["value"])
        return _ENUMS[name](inner) if name in _ENUMS else _TUPLES[name](*inner)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_decode(item) for item in value)
    return value
