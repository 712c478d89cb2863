"""Rewrites a committed checkpoint for another layout, without GPUs, without the model and in bounded memory.

Indexes say what every byte is, so no model is needed. What is missing are the cuts and stages of the new layout:

- Stages end where `--pipeline-layout`, `--hybrid-layer-pattern` (megatron's own texts) or the even division say. Layers
  go where `PipelineSplit` puts them. Where pipeline sizes stay and nothing else is asked for, they stay.
- Sections are pieces even where nothing is cut: gate and up, and what a GatedDeltaNet or MambaMixer computes in one go
  (queries, keys, values, ...), each with its length. So an index says how such a tensor is cut under another size. A
  mixer's tensor in one piece is refused, because cutting it evenly would make queries of keys.
- The optimizer's ranges are even parts of all dense parameters of a (pp, tp) in the order of names, and of all experts
  of a (pp, etp, ep): any partition loads. A replicated optimizer becomes a sharded one.
- The world stays as large as it was if the other sizes divide it. Otherwise it is as small as they allow: data
  parallelism follows, as in Megatron. `--etp` follows `--tp` if it was the same.
- The vocabulary keeps its padded rows if they divide. Otherwise it is padded to the next multiple of tp, with zeros.
  `--vocab-size` and `--make-vocab-size-divisible-by` pad it as Megatron would.
- Generators and `extra_state` follow the rule of a load (`Topology.place_in_turn`). Where generators cannot go on, a
  rank's file has the saved seed alone.
- Roles. If a step is resharded, all its roles are put in place when all are written. One role alone declares only
  itself. What the trainer keeps in the step (verl's `data.pt`, `transfer_queue/`) is copied as it is, put in place just
  before the roles, and named in the report.

Everything is planned and checked first. Then one thread reads parts of files of 128 MiB, checked block by block, into
one of two buffers, while the other buffer is written. A file is written by as many writers as it has parts, one after
the other, all in one process. A large copy of a source file (HuggingFace weights) is checked against the manifest's CRC
on the way.
"""
