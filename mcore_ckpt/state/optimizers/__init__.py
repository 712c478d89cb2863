"""The kinds of optimizers that this package can save, one module each.

`part.py` defines the questions that all kinds answer, and answers them for kinds that keep their state as torch does.
`chain.py` finds the kind of each optimizer in a chain.
"""
