// -- one role's checkpoint: the data from mcore_ckpt/tools/examine/overview.py, and the questions that the page asks --

const NO_ALIAS = -1;

class Checkpoint {
  constructor(role) {
    Object.assign(this, role);
    this.files = role.files.map(([path, kind, rank, size]) => ({ path, kind, rank, size }));
    this.ranks = role.ranks.map((numbers) => Object.fromEntries(role.axes.map((axis, at) => [axis, numbers[at]])));
    this.regions = role.regions.map(([globalShape, localShape, pieces]) => ({
      globalShape,
      localShape,
      pieces: pieces.map(([localOffset, shape, globalOffset]) => ({ localOffset, shape, globalOffset })),
    }));
    this.lowered = role.tensors.map((name) => name.toLowerCase());
    // The shards are ordered by tensor. Tensor t has the shards from first[t] up to, but without, first[t + 1].
    this.first = new Uint32Array(role.tensors.length + 1);
    for (const tensor of role.shards.tensor) this.first[tensor + 1] += 1;
    for (let tensor = 0; tensor < role.tensors.length; tensor++) this.first[tensor + 1] += this.first[tensor];
    this.stored = this.storedByRank();
    this.alike = new Map();
  }

  // The bytes that each rank has written. Without a timeline, a file that several ranks wrote counts for its owner.
  storedByRank() {
    if (this.timeline) return this.timeline.bytes;
    const sums = new Array(this.ranks.length).fill(0);
    for (const file of this.files) sums[file.rank] += file.size;
    return sums;
  }

  get size() {
    return this.files.reduce((sum, file) => sum + file.size, 0);
  }

  shard(number) {
    const column = this.shards;
    return {
      number,
      kind: this.kinds[column.kind[number]],
      dtype: this.dtypes[column.dtype[number]],
      file: this.files[column.file[number]],
      region: this.regions[column.region[number]],
      start: column.start[number],
      stop: column.stop[number],
      offset: column.offset[number],
      nbytes: column.nbytes[number],
      sameAs: column.same_as[number] === NO_ALIAS ? null : this.kinds[column.same_as[number]],
    };
  }

  shardsOf(tensor) {
    const found = [];
    for (let number = this.first[tensor]; number < this.first[tensor + 1]; number++) found.push(this.shard(number));
    // The weights come first, then each part of the optimizer's state.
    const order = (shard) => [shard.file.kind === 'optimizer', this.kinds.indexOf(shard.kind)];
    return found.sort((a, b) => order(a)[0] - order(b)[0] || order(a)[1] - order(b)[1]);
  }

  // The size of all shards of a tensor, in bytes.
  nbytesOf(tensor) {
    let sum = 0;
    for (let number = this.first[tensor]; number < this.first[tensor + 1]; number++) sum += this.shards.nbytes[number];
    return sum;
  }

  // The ranks whose model or optimizer has the tensors of a file. All replicas have the tensors of a model's file.
  holdersOf(file) {
    const axes = { model: ['tp', 'pp'], experts: ['etp', 'pp', 'ep'] }[file.kind];
    if (axes === undefined) return [file.rank];
    const key = axes.map((axis) => `${axis}${this.ranks[file.rank][axis]}`).join();
    if (!this.alike.has(key)) {
      const alike = (at) => axes.every((axis) => at[axis] === this.ranks[file.rank][axis]);
      this.alike.set(key, this.ranks.flatMap((at, rank) => (alike(at) ? [rank] : [])));
    }
    return this.alike.get(key);
  }

  // For each kind of shard, the size of all its shards in bytes.
  nbytesByKind() {
    const sums = this.kinds.map((kind) => [kind, 0]);
    this.shards.kind.forEach((kind, number) => (sums[kind][1] += this.shards.nbytes[number]));
    return sums.filter(([, size]) => size > 0);
  }

  // The virtual stage that has the layer of a tensor, if the manifest lists one.
  stageOf(tensor) {
    const match = /(?:^|\.)(decoder|mtp)\.layers\.(\d+)\./.exec(this.tensors[tensor]);
    return match ? this.stages.find((stage) => stage[match[1]].includes(Number(match[2]))) : undefined;
  }

  // Finds the tensors whose names have all words of a text. "layer 3" means the layer with this number, "row 17" a row.
  search(text) {
    let row = null;
    const rest = text.toLowerCase().replace(/\brow\s*(\d+)/, (_, number) => ((row = Number(number)), ' '));
    const words = rest.replace(/\blayers?\s+(\d+)(?=\s|$)/g, 'layers.$1.').split(/\s+/).filter(Boolean);
    const found = [];
    this.lowered.forEach((name, tensor) => words.every((word) => name.includes(word)) && found.push(tensor));
    return { found, row };
  }
}

// A rank's coordinates, such as "tp 1, pp 0, dp 3", without the axes that have one rank.
function placeOf(checkpoint, rank) {
  const at = checkpoint.ranks[rank];
  const axes = ['tp', 'pp', 'cp', 'dp', 'ep'].filter((axis) => checkpoint.topology[axis] > 1);
  return axes.map((axis) => `${axis} ${at[axis]}`).join(', ') || 'the only rank';
}
