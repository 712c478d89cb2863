"""Reads checkpoints without changing them: finds, lists, verifies and compares them, and watches saves."""

__all__ = [
    "compare",
    "contents",
    "diff",
    "differences",
    "doctor",
    "find",
    "nearby",
    "overview",
    "select",
    "step_list",
    "tensor_details",
    "verify",
    "watch",
    "what_is",
]
