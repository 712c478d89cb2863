"""Rewrites a committed checkpoint for another layout, without GPUs, without the model and in bounded memory.

The indexes describe every byte, so no model is needed. The cuts and stages of the new layout follow these rules:

- `--pipeline-layout` or `--hybrid-layer-pattern` (texts in megatron's form) say where stages end; without them, layers
  are divided evenly. `PipelineSplit` places the layers. If the pipeline sizes stay and no option asks for another
  division, the stages stay as saved.
- Sections are stored as separate pieces even under a tensor-parallel size of 1: gate and up, and the inputs that a
  GatedDeltaNet or MambaMixer computes in one product (queries, keys, values, ...). So an index shows how to cut such a
  tensor under another size. A mixer's tensor that is stored in one piece is refused, because an even cut would mix
  queries and keys.
- At each (pp, tp), the data-parallel ranks divide the elements of all dense parameters evenly, in the order of names.
  At each (pp, etp, ep), the data-parallel ranks divide the elements of all expert parameters in the same way. A load
  accepts any such division. A replicated optimizer becomes a sharded optimizer.
- If neither `--world` nor `--dp` is given, the world size stays as saved if tp x pp x cp and etp x ep x pp divide it.
  Otherwise the new world size is the smallest number that both products divide. The data-parallel size follows from
  the world size, as in Megatron. If `--etp` is not given, it equals `--tp` if both were equal in the checkpoint, or if
  `--ep` becomes 1.
- The vocabulary keeps its padded rows if tp divides them. Otherwise it is padded to the next multiple of tp, with
  zeros. With `--vocab-size` and `--make-vocab-size-divisible-by`, the vocabulary is padded as in Megatron.
- Random states and `extra_state` follow the rule of a load (`Topology.place_in_turn`). Under another data-parallel
  size, each rank's data positions contain the positions of all saved ranks. If random number generators cannot go on, a
  rank's file has only the saved seed.
- If a whole step is resharded, its roles are put in place together, once all are written. If one role is resharded
  alone, the new step declares only this role. The files that the trainer keeps in the step (verl's `data.pt`,
  `transfer_queue/`) are copied unchanged, put in place just before the roles, and named in the report.

Everything is planned and checked first. Then one thread reads 128 MiB of a file into one of two buffers and checks
these bytes block by block, while the other buffer is written. In a save, several ranks write a large file, one part
each; here, one process writes all these parts in turn. Files that are copied unchanged (HuggingFace weights) are
checked against the CRC in the manifest during the copy.
"""
