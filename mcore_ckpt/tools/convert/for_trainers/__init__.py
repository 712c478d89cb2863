"""Converts a checkpoint of this package for megatron's `dist_checkpointing.load`, for other trainers to resume from.

One checkpoint fits all three of megatron's optimizer classes (`shared_state.py`, `tensors.py`). Megatron loads a chain
of two optimizers (dense and expert) only into a chain of two, even from megatron's own checkpoints. A step that
`mcore-ckpt reshard` has written gets the chain of its new layout. Scaled moments are written as fp32, and so are main
parameters that are stored as remainders. Megatron's `fully_reshardable` does the same. transformer-engine cannot turn
fp32 back into remainders, and the command says this in a note.

The optimizer's form is `fully_reshardable`. The offline converter has neither ranks nor buckets, so it needs a form in
which each tensor has its parameter's shape. `DistributedOptimizer` in megatron 0.16 to 0.19 knows another such form by
name, `fully_sharded_model_space`, but raises an error for it (`ShardedTensor.flattened_range`). The checkpoint
determines how it is loaded: Megatron-LM and verl make the `sharded_state_dict` of a load with the flags in the
checkpoint's `content_metadata`, not with the flags from their arguments. So our `content_metadata` names the
optimizer's form. It also sets `non_homogeneous_layers`, so that each layer has separate keys, even if all layers are
alike.
"""
