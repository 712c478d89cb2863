// -- where a tensor is: the list of tensors, the drawing of how one tensor is cut, and where one row of it is --

const DRAWING_HEIGHT = 330;
const AXIS_WIDTH = 64;

class TensorSection {
  constructor(page) {
    this.page = page;
    this.list = new VirtualList(at('tensor-list'), 30, 'button', (row, index) => this.drawRow(row, this.found[index]));
    at('search').oninput = () => this.search();
    at('row').oninput = () => page.chooseRow(Number(at('row').value));
    const drawing = at('drawing');
    drawing.onclick = (event) => this.rowAt(event.offsetY) !== null && page.chooseRow(this.rowAt(event.offsetY));
    drawing.onkeydown = (event) => this.onKey(event);
    tips(drawing, (x, y) => this.tip(x, y));
    new ResizeObserver(() => this.draw()).observe(drawing.parentElement);
  }

  show(checkpoint) {
    Object.assign(this, { checkpoint, tensor: null, kind: null, row: 0 });
    this.search();
    this.choose(this.firstToShow(), 0);
  }

  // The first matrix, since a vector shows less of how tensors are cut.
  firstToShow() {
    const isMatrix = (tensor) => this.checkpoint.shardsOf(tensor).some(({ region }) => region.globalShape.length > 1);
    return this.found.find(isMatrix) ?? this.found[0] ?? null;
  }

  search() {
    const { found, row } = this.checkpoint.search(at('search').value);
    Object.assign(this, { found, searchedRow: row });
    const all = this.checkpoint.tensors.length;
    at('found').textContent = found.length === all ? plural(all, 'tensor') : `${count(found.length)} of ${plural(all, 'tensor')}`;
    this.list.element.scrollTop = 0;
    this.list.show(found.length);
  }

  drawRow(row, tensor) {
    row.classList.toggle('chosen', tensor === this.tensor);
    row.onclick = () => this.page.chooseTensor(tensor, this.searchedRow ?? 0);
    const size = make('span', { className: 'quiet small', textContent: bytes(this.checkpoint.nbytesOf(tensor)) });
    row.append(nameCell(this.checkpoint.tensors[tensor]), size);
  }

  // Shows a tensor; `kind` is the part of the state to draw, if the tensor has it.
  choose(tensor, row, kind = this.kind) {
    this.tensor = tensor;
    this.shards = tensor === null ? [] : this.checkpoint.shardsOf(tensor);
    const kinds = [...new Set(this.shards.map((shard) => shard.kind))];
    this.kind = kinds.includes(kind) ? kind : (kinds[0] ?? null);
    this.list.show(this.found.length);
    if (this.found.includes(tensor)) this.list.reveal(this.found.indexOf(tensor));
    at('tensor-name').textContent = tensor === null ? 'no tensors' : this.checkpoint.tensors[tensor];
    at('kinds').replaceChildren(...kinds.map((each) => this.tab(each)));
    at('cuts').replaceChildren(...this.cuts());
    this.choosePart(this.kind);
    this.chooseRow(row);
  }

  tab(kind) {
    return make('button', { textContent: kind, role: 'tab', onclick: () => (this.choosePart(kind), this.chooseRow(this.row)) });
  }

  choosePart(kind) {
    this.kind = kind;
    for (const tab of at('kinds').children) tab.setAttribute('aria-selected', String(tab.textContent === kind));
    const drawn = this.shards.filter((shard) => shard.kind === kind);
    this.parts = drawn.map((shard) => ({ shard, boxes: boxesOf(shard.region, shard.start, shard.stop) }));
    const shape = drawn.length ? drawn[0].region.globalShape : [];
    this.rows = shape.length ? shape[0] : 1;
    this.columns = shape.length > 1 ? shape[1] : 1;
    this.findPlaces();
    at('row').max = Math.max(0, this.rows - 1);
    const dtypes = [...new Set(drawn.map((shard) => shard.dtype))].join(', ');
    const size = drawn.reduce((sum, shard) => sum + shard.nbytes, 0);
    at('tensor-facts').textContent = drawn.length
      ? `${dtypes} [${shape.join(', ')}], ${bytes(size)} of ${kind} in ${plural(drawn.length, 'shard')}`
      : 'no file holds a part of it';
    at('drawing-note').textContent = shape.length > 2
      ? `Rows are axis 0, columns axis 1; the other axes (${shape.slice(2).join(', ')}) are not drawn.`
      : 'Colours tell tensor-parallel ranks apart, and tones the shards of each. Click a row, or use the arrow keys.';
    this.draw();
  }

  chooseRow(row) {
    this.row = Math.max(0, Math.min(Math.trunc(row) || 0, this.rows - 1));
    if (Number(at('row').value) !== this.row) at('row').value = this.row;
    this.draw();
    this.answer();
  }

  // -- how a tensor is cut, in words --

  cuts() {
    if (!this.shards.length) return [];
    const { topology, ranks } = this.checkpoint;
    const weights = this.shards.filter((shard) => shard.file.kind === 'model' || shard.file.kind === 'experts');
    const state = this.shards.filter((shard) => shard.file.kind === 'optimizer');
    const isExpert = weights.some((shard) => shard.file.kind === 'experts');
    const stage = this.checkpoint.stageOf(this.tensor);
    const of = (axis, shards) => [...new Set(shards.map((shard) => ranks[shard.file.rank][axis]))].sort((a, b) => a - b);
    const found = [];
    const say = (axis, text, isCut) =>
      found.push(make('li', { className: isCut ? 'cut' : '' }, make('b', { textContent: axis }), text));
    const tensorAxis = isExpert ? 'etp' : 'tp';
    if (topology[tensorAxis] > 1) this.sayTensorParallel(say, tensorAxis, weights.length ? weights : state);
    if (topology.pp > 1) say('PP', `stage ${of('pp', this.shards).join(', ')} of ${topology.pp}`, true);
    if (topology.vpp > 1 && stage) say('VPP', `virtual stage ${stage.vp} of ${topology.vpp}`, true);
    if (topology.ep > 1) isExpert ? say('EP', `on ${of('ep', weights).join(', ')} of ${topology.ep}`, true) : say('EP', 'no expert', false);
    if (topology.cp > 1) say('CP', `weights on all ${topology.cp}`, false);
    const replicas = isExpert ? 'edp' : 'dp';
    if (topology[replicas] > 1) {
      const owners = of(replicas, state).length;
      const cut = state.length ? `, optimizer on ${owners === topology[replicas] ? 'all' : `${owners} of them`}` : '';
      say(replicas.toUpperCase(), `weights on all ${topology[replicas]}${cut}`, state.length > 0);
    }
    return found;
  }

  sayTensorParallel(say, axis, shards) {
    const regions = [...new Set(shards.map((shard) => shard.region))];
    const [{ globalShape, localShape, pieces }] = regions;
    const cut = globalShape.findIndex((length, at) => length !== localShape[at]);
    if (cut < 0) return say(axis.toUpperCase(), `whole on each of ${this.checkpoint.topology[axis]}`, false);
    const sections = pieces.length > 1 ? `, ${pieces.length} sections each` : '';
    return say(axis.toUpperCase(), `cut into ${regions.length} along axis ${cut}${sections}`, true);
  }

  // -- the drawing --

  // Gives each part the number of its place. Replicas have the same place, and so the same colour.
  findPlaces() {
    const keys = this.parts.map(({ boxes }) => JSON.stringify(boxes.map((box) => box.global)));
    const distinctKeys = [...new Set(keys)];
    this.parts.forEach((part, index) => (part.place = distinctKeys.indexOf(keys[index])));
    this.places = distinctKeys.map((key) => ({ rank: this.parts[keys.indexOf(key)].shard.file.rank }));
    const axis = this.parts.some(({ shard }) => shard.file.kind === 'experts') ? 'etp' : 'tp';
    const families = new Map();
    for (const place of this.places) {
      const family = this.checkpoint.ranks[place.rank][axis];
      families.set(family, [...(families.get(family) ?? []), place]);
    }
    [...families.values()].forEach((family, number) =>
      family.forEach((place, index) => Object.assign(place, { family: number, families: families.size, tone: (0.62 * index) / Math.max(1, family.length) })));
  }

  colourOf(place) {
    const { family, families, tone } = this.places[place];
    return mixed(distinct(family, families), colour('card'), tone);
  }

  draw() {
    const canvas = at('drawing');
    const width = canvas.parentElement.clientWidth;
    if (!width || !this.checkpoint) return;
    const drawing = context(canvas, width, DRAWING_HEIGHT);
    this.frame = { left: AXIS_WIDTH, top: 20, width: width - AXIS_WIDTH - 2, height: DRAWING_HEIGHT - 24 };
    if (!this.parts?.length) return;
    for (const { place, boxes } of this.parts) {
      drawing.fillStyle = this.colourOf(place);
      for (const { global } of boxes) drawing.fillRect(...this.rectangle(global));
    }
    this.label(drawing);
    this.axes(drawing);
    this.markRow(drawing);
  }

  rectangle(box) {
    const { left, top, width, height } = this.frame;
    const [[row, rows], [column, columns]] = [spanOf(box, 0), spanOf(box, 1)];
    const [x, y] = [left + (column / this.columns) * width, top + (row / this.rows) * height];
    const [wide, high] = [(columns / this.columns) * width, (rows / this.rows) * height];
    // Leave a gap between boxes, unless the boxes are too small for that.
    return [x, y, Math.max(0.75, wide - (wide > 4 ? 1 : 0)), Math.max(0.75, high - (high > 4 ? 1 : 0))];
  }

  label(drawing) {
    drawing.textAlign = 'center';
    const seen = new Set();
    for (const { shard, place, boxes } of this.parts) {
      if (seen.has(place)) continue;
      seen.add(place);
      const text = this.labelOf(place, shard);
      drawing.fillStyle = colour(this.places[place].tone > 0.25 ? 'ink' : 'card');
      for (const { global } of boxes) {
        const [x, y, wide, high] = this.rectangle(global);
        if (high >= 15 && drawing.measureText(text).width + 6 <= wide) drawing.fillText(text, x + wide / 2, y + high / 2);
      }
    }
  }

  labelOf(place, shard) {
    const ranks = this.parts.filter((part) => part.place === place).flatMap((part) => this.checkpoint.holdersOf(part.shard.file));
    if (ranks.length === 1) return `rank ${ranks[0]}`;
    const { topology, ranks: all } = this.checkpoint;
    const coordinates = shard.file.kind === 'experts' ? ['etp', 'ep'] : ['tp'];
    const said = coordinates.filter((axis) => topology[axis] > 1 && new Set(ranks.map((rank) => all[rank][axis])).size === 1);
    const place_ = said.map((axis) => `${axis} ${all[ranks[0]][axis]}`).join(', ');
    return place_ ? `${place_}: ${ranks.length} ranks` : `${ranks.length} ranks`;
  }

  axes(drawing) {
    const { left, top, width, height } = this.frame;
    drawing.fillStyle = colour('quiet');
    drawing.textAlign = 'right';
    // Leave out a label where the label of the chosen row will be (`markRow`).
    const middle = this.middleOfRow();
    if (middle > top + 20) drawing.fillText('row 0', left - 12, top + 6);
    if (this.rows > 1 && middle < top + height - 20) drawing.fillText(count(this.rows - 1), left - 12, top + height - 6);
    drawing.textAlign = 'left';
    drawing.fillText('column 0', left, 9);
    drawing.textAlign = 'right';
    if (this.columns > 1) drawing.fillText(count(this.columns - 1), left + width, 9);
  }

  markRow(drawing) {
    const { left, top, width, height } = this.frame;
    const rowHeight = height / this.rows;
    const y = top + this.row * rowHeight;
    drawing.strokeStyle = colour('ink');
    drawing.lineWidth = 2;
    drawing.strokeRect(left - 1, y - (rowHeight < 2 ? 1 : 0), width + 2, Math.max(2, rowHeight - 1));
    const middle = this.middleOfRow();
    drawing.fillStyle = colour('ink');
    drawing.beginPath();
    drawing.moveTo(left - 2, middle);
    drawing.lineTo(left - 9, middle - 5);
    drawing.lineTo(left - 9, middle + 5);
    drawing.fill();
    drawing.textAlign = 'right';
    drawing.fillText(this.row ? count(this.row) : 'row 0', left - 12, Math.min(middle, top + height - 6));
  }

  middleOfRow() {
    return this.frame.top + ((this.row + 0.5) * this.frame.height) / this.rows;
  }

  rowAt(y) {
    if (!this.frame || !this.parts.length) return null;
    const row = Math.floor(((y - this.frame.top) / this.frame.height) * this.rows);
    return row >= 0 && row < this.rows ? row : null;
  }

  tip(x, y) {
    const row = this.rowAt(y);
    const column = this.frame && Math.floor(((x - this.frame.left) / this.frame.width) * this.columns);
    if (row === null || column < 0 || column >= this.columns) return null;
    const inside = ([start, length], position) => position >= start && position < start + length;
    const hits = this.parts.filter(({ boxes }) =>
      boxes.some(({ global }) => inside(spanOf(global, 0), row) && inside(spanOf(global, 1), column)));
    const files = hits.slice(0, 4).map(({ shard }) => shard.file.path);
    return [`row ${count(row)}, column ${count(column)}`, ...files, ...(hits.length > 4 ? [`and ${hits.length - 4} more`] : [])].join('\n');
  }

  onKey(event) {
    const step = { ArrowUp: -1, ArrowDown: 1, PageUp: -16, PageDown: 16 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.page.chooseRow(this.row + step);
  }

  // -- where a row is --

  // For each shard that has a part of the chosen row, the bytes and the columns of this part.
  placesOfRow() {
    return this.shards.flatMap((shard) => {
      const spans = boxesOf(shard.region, shard.start, shard.stop).flatMap((box) => {
        const local = rowInLocal(shard.region, box, this.row);
        return local === null ? [] : [{ box, local }];
      });
      if (!spans.length) return [];
      const elements = shard.stop - shard.start;
      const size = elements ? shard.nbytes / elements : 0;
      const [first, last] = [Math.min(...spans.map(({ local }) => local[0])), Math.max(...spans.map(({ local }) => local[1]))];
      const columns = spans.map(({ box }) => spanOf(box.global, 1));
      return [{
        shard,
        start: shard.offset + (first - shard.start) * size,
        stop: shard.offset + (last - shard.start + 1) * size,
        columns: columns.map(([from, length]) => range(from, from + length - 1)).join(' and '),
        isWhole: columns.some(([, length]) => length === this.columns),
      }];
    });
  }

  answer() {
    const places = this.tensor === null ? [] : this.placesOfRow();
    at('row-count').textContent = this.tensor === null ? '' : `of ${count(this.rows)}`;
    const ranksOf = (isWanted) =>
      [...new Set(places.filter(({ shard }) => isWanted(shard)).flatMap(({ shard }) => this.checkpoint.holdersOf(shard.file)))].sort((a, b) => a - b);
    const weights = ranksOf((shard) => shard.file.kind !== 'optimizer');
    const state = ranksOf((shard) => shard.file.kind === 'optimizer');
    this.holders = { weights, state };
    const lines = [[weights, 'Weights on'], [state, 'Optimizer state on']].filter(([ranks]) => ranks.length);
    at('holders').replaceChildren(...lines.map(([ranks, text]) =>
      make('span', { className: 'holder' }, `${text} ${ranks.length === 1 ? 'rank' : `${count(ranks.length)} ranks:`} `,
        rankButtons(ranks, (rank) => this.page.chooseRank(rank)), ranks.length === 1 ? ` (${placeOf(this.checkpoint, ranks[0])})` : '')));
    const most = 24;
    at('answer').replaceChildren(...places.slice(0, most).map((place) => this.placeRow(place)));
    if (places.length > most) at('answer').append(make('p', { className: 'quiet small', textContent: `and ${count(places.length - most)} more` }));
    this.page.showHolders(this.holders);
  }

  placeRow({ shard, start, stop, columns, isWhole }) {
    const where = shard.sameAs === null ? `bytes ${range(start, stop - 1)} (${bytes(stop - start)})` : `the bytes of ${shard.sameAs}`;
    const details = [`written by rank ${shard.file.rank} (${placeOf(this.checkpoint, shard.file.rank)})`];
    if (!isWhole) details.push(`columns ${columns}`);
    return make('div', { className: 'place' },
      make('div', { className: 'what' }, make('b', { textContent: shard.kind }), make('span', { textContent: where })),
      make('div', { className: 'mono', textContent: shard.file.path }),
      make('div', { className: 'quiet', textContent: details.join('; ') }));
  }
}
