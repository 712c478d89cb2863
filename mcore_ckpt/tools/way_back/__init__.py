"""Converts a checkpoint of this package for megatron's `dist_checkpointing.load`, so that other trainers go on from it.

`convert.py` tells the walk. `tensors.py` plans the tensors, `shared_state.py` makes what all ranks share,
`random_states.py` the random states, and `layouts.py` knows the folders that each framework reads.
"""
