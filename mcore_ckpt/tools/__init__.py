"""Tools without a trainer, in three rooms: `examine` only reads, `convert` writes checkpoints, `maintain` cleans roots.

`__all__` lists the public rooms, and each of these rooms lists its public modules. In these modules, all functions and
classes are public unless their names begin with an underscore. `maintain` may import the other two, and `convert` may
import `examine`.
"""

__all__ = ["convert", "examine", "maintain"]
