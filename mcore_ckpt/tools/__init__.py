"""Tools without a trainer: merge, convert, reshard, compare, diff, verify, prune, collect, watch, doctor, bench.

The public names of this room are the modules in `__all__`. Their functions and classes are public unless their names
begin with an underscore.
"""

__all__ = [
    "bench",
    "collect",
    "compare",
    "contents",
    "convert",
    "convert_native",
    "convert_torch_dist",
    "diff",
    "differences",
    "doctor",
    "find",
    "merge",
    "nearby",
    "overview",
    "prune",
    "push_to_hub",
    "reshard",
    "select",
    "step_list",
    "tensor_details",
    "verify",
    "watch",
    "way_back",
    "what_is",
]
