"""Tools that work without a trainer: merge, convert, reshard, compare, verify, prune.

The public names of this room are its modules below. Their functions and classes are public unless they begin with an
underscore.
"""

__all__ = [
    "compare",
    "contents",
    "convert",
    "convert_native",
    "convert_torch_dist",
    "find",
    "merge",
    "prune",
    "push_to_hub",
    "reshard",
    "verify",
]
