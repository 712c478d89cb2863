"""Tools without a trainer, in three rooms: `examine` only reads, `convert` writes checkpoints, `maintain` cleans roots.

The public names of this room are the rooms in `__all__` and the modules that they list. The functions and classes of
these modules are public unless their names begin with an underscore. `maintain` may import the other two, and
`convert` may import `examine`.
"""

__all__ = ["convert", "examine", "maintain"]
