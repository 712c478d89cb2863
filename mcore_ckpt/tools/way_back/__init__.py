"""Converts a checkpoint of this package for megatron's `dist_checkpointing.load`, so that other trainers go on from it.

`convert.py` tells the walk. `tensors.py` plans the tensors, `shared_state.py` makes what all ranks share,
`random_states.py` the random states, and `layouts.py` knows the folders that each framework reads.

One checkpoint fits all three optimizer classes (`shared_state.py`, `tensors.py`). Megatron loads a chain of two
optimizers (dense and expert) only into a chain of two, and its own checkpoints have the same limit. A step that
`mcore-ckpt reshard` has made gets the chain of its new layout. Scaled moments and halves of main parameters are written
as fp32, as megatron's `fully_reshardable` has them. transformer-engine cannot take fp32 back into remainders, so the
command says so.
"""
