"""Rewrites a committed checkpoint for another layout, without GPUs, without the model and in bounded memory.

Indexes say what every byte is, so no model is needed. The cuts and stages of the new layout follow these rules:

- Stages end where `--pipeline-layout`, `--hybrid-layer-pattern` (texts in megatron's form) or the even division say.
  `PipelineSplit` places the layers. If the pipeline sizes stay and no other division is asked for, the stages stay.
- Sections are stored as pieces even if nothing is cut: gate and up, and the inputs that a GatedDeltaNet or MambaMixer
  computes in one go (queries, keys, values, ...), each with its length. So an index says how to cut such a tensor under
  another size. A mixer's tensor in one piece is refused, because an even cut would take keys for queries.
- The data-parallel ranks of a (pp, tp) divide the elements of all its dense parameters evenly, in the order of names.
  The data-parallel ranks of a (pp, etp, ep) do the same with its experts. A load accepts any partition. A replicated
  optimizer becomes a sharded one.
- The world size stays as it was if the other sizes divide it. Otherwise it is the smallest size that they allow. The
  data-parallel size follows from it, as in Megatron. `--etp` follows `--tp` if both were the same.
- The vocabulary keeps its padded rows if tp divides them. Otherwise it is padded to the next multiple of tp, with
  zeros. `--vocab-size` and `--make-vocab-size-divisible-by` pad it as Megatron would.
- Random states and `extra_state` follow the rule of a load (`Topology.place_in_turn`). Under another data-parallel
  size, data positions get those of all saved ranks. If random number generators cannot go on, a rank's file has only
  the saved seed.
- If a whole step is resharded, its roles are put in place together, once all are written. If one role is resharded
  alone, the new step declares only this role. The files that the trainer keeps in the step (verl's `data.pt`,
  `transfer_queue/`) are copied unchanged, put in place just before the roles, and named in the report.

Everything is planned and checked first. Then one thread reads a part of a file, 128 MiB, into one of two buffers and
checks it block by block, while the other buffer is written. A large file is written as several ranks would write it,
one part each, but one process writes all parts, one after the other. Files that are copied as they are (HuggingFace
weights) are checked against the manifest's CRC on the way.
"""
