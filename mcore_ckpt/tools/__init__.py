"""Tools that work without a trainer: merge, convert, reshard, compare, verify, prune, overview, doctor, bench.

The public names of this room are the modules in `__all__`. Their functions and classes are public unless their names
begin with an underscore.
"""

__all__ = [
    "bench",
    "compare",
    "contents",
    "convert",
    "convert_native",
    "convert_torch_dist",
    "doctor",
    "find",
    "merge",
    "overview",
    "prune",
    "push_to_hub",
    "reshard",
    "verify",
    "way_back",
]
