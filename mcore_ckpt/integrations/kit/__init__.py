"""The code that all integrations share.

- `kept`: the one CheckpointManager that an integration keeps between saves;
- `options`: options that a framework cannot honour, and how many checkpoints a framework keeps;
- `together`: decisions of rank 0 for all ranks;
- `driver`: how a driver commits its role alone, retention after the commit, and which steps are complete;
- `objects`: a framework's objects with other attributes, or with one more base class;
- `free_names`: a name for what is moved aside;
- `published`: the config of the HuggingFace model that a training started from;
- `loop`: saving and loading for loops like Megatron-LM's, with `arguments` (their options, by Megatron-LM's names),
  `resume` (which checkpoint such a loop resumes from) and `rerun` (the state of a step that is to be run again).

An integration only translates its framework's options and calls into calls of these modules.
"""
