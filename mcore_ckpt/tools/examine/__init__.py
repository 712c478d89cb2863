"""Looks at checkpoints and changes none: finds, lists, verifies, compares, and follows them while they are written."""

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
