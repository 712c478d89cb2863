"""The kinds of optimizers that this package can save, one module each.

`part.py` has what all kinds answer, and the answers of those that keep their state as torch does. `chain.py` finds the
kind of each optimizer in a chain.
"""
