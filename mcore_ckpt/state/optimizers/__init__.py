"""The kinds of optimizers that this package can save, one module each.

`part.py` has the questions that all kinds answer, and the answers of kinds that keep their state as torch does.
`chain.py` finds the kind of each optimizer in a chain.
"""
