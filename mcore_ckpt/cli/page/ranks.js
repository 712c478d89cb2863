// -- the grid of ranks, and what one rank has written --

const LABELS = { top: 20, left: 52, between: 26 };

class RankSection {
  constructor(page) {
    this.page = page;
    this.holders = { weights: [], state: [] };
    const grid = at('grid');
    grid.onclick = (event) => {
      const rank = this.rankAt(event.offsetX, event.offsetY);
      if (rank !== null) page.chooseRank(rank);
    };
    tips(grid, (x, y) => this.tip(x, y));
    new ResizeObserver(() => this.draw()).observe(grid.parentElement);
  }

  show(checkpoint) {
    this.checkpoint = checkpoint;
    const { timeline, topology } = checkpoint;
    this.colours = { bytes: { text: 'bytes written', of: (rank) => checkpoint.stored[rank], say: bytes } };
    if (timeline) {
      this.colours.seconds = { text: 'time of writing', of: (rank) => timeline.write[1][rank] - timeline.write[0][rank], say: seconds };
    }
    for (const axis of ['ep', 'etp', 'edp']) {
      if (topology[axis] > 1) this.colours[axis] = { text: axis, of: (rank) => checkpoint.ranks[rank][axis], say: String };
    }
    options(at('colour'), Object.fromEntries(Object.entries(this.colours).map(([key, { text }]) => [key, text])), (key) => this.paint(key));
    const virtual = topology.vpp > 1 ? `, each with ${topology.vpp} virtual stages` : '';
    at('grid-note').textContent =
      `Each group is a pipeline stage${virtual}; its rows are the tensor-parallel ranks${topology.cp > 1 ? ' and context-parallel ranks' : ''}, `
      + 'its columns the data-parallel ranks. Orange frames: ranks that have the chosen row (dashed: only its weights).';
    this.arrange();
    this.chooseRank(0);
    this.paint('bytes');
  }

  // Gives each rank its group, row and column.
  arrange() {
    const { ranks, topology } = this.checkpoint;
    this.cells = ranks.map(({ pp, cp, tp, dp }) => ({ group: pp, row: cp * topology.tp + tp, column: dp }));
    this.shape = { groups: topology.pp, rows: topology.cp * topology.tp, columns: topology.dp };
    this.byCell = new Map(this.cells.map(({ group, row, column }, rank) => [`${group} ${row} ${column}`, rank]));
  }

  paint(key) {
    this.chosenColour = this.colours[key];
    const values = this.checkpoint.ranks.map((_, rank) => this.chosenColour.of(rank));
    this.values = { each: values, most: values.reduce((a, b) => Math.max(a, b), 0), least: values.reduce((a, b) => Math.min(a, b), Infinity) };
    this.draw();
  }

  showHolders(holders) {
    this.holders = holders;
    this.draw();
  }

  draw() {
    const canvas = at('grid');
    const width = canvas.parentElement.clientWidth;
    if (!width || !this.values) return;
    const { groups, rows, columns } = this.shape;
    const fitting = Math.floor((width - LABELS.left) / columns);
    this.cell = { wide: Math.max(4, Math.min(58, fitting)), high: Math.max(4, Math.min(30, fitting)) };
    // Put stages next to each other if they fit.
    const groupWidth = LABELS.left + columns * this.cell.wide;
    this.across = Math.max(1, Math.min(groups, Math.floor((width + 10) / groupWidth)));
    this.groupSize = { wide: groupWidth, high: LABELS.top + rows * this.cell.high + 12 };
    const drawing = context(canvas, Math.max(width, groupWidth), Math.ceil(groups / this.across) * this.groupSize.high);
    for (let group = 0; group < groups; group++) this.labelGroup(drawing, group);
    this.cells.forEach((_, rank) => this.drawCell(drawing, rank));
    this.frame(drawing, this.rank, [], colour('ink'), 0);
    for (const rank of this.holders.weights) this.frame(drawing, rank, [3, 3], colour('mark'), 2);
    for (const rank of this.holders.state) this.frame(drawing, rank, [], colour('mark'), 2);
  }

  placeOfCell({ group, row, column }) {
    const left = (group % this.across) * this.groupSize.wide + LABELS.left;
    const top = Math.floor(group / this.across) * this.groupSize.high + LABELS.top;
    return [left + column * this.cell.wide, top + row * this.cell.high];
  }

  labelGroup(drawing, group) {
    const { topology } = this.checkpoint;
    const [left, top] = this.placeOfCell({ group, row: 0, column: 0 });
    drawing.fillStyle = colour('quiet');
    drawing.textAlign = 'left';
    drawing.fillText(`stage ${group}`, left, top - 10);
    drawing.textAlign = 'right';
    if (this.cell.high < 12) return;
    for (let row = 0; row < this.shape.rows; row++) {
      const text = topology.cp > 1 ? `cp${Math.floor(row / topology.tp)} tp${row % topology.tp}` : `tp ${row}`;
      drawing.fillText(text, left - 6, top + (row + 0.5) * this.cell.high);
    }
  }

  drawCell(drawing, rank) {
    const { each, most, least } = this.values;
    const [x, y] = this.placeOfCell(this.cells[rank]);
    const { wide, high } = this.cell;
    const share = most > least ? (each[rank] - least) / (most - least) : 0.25;
    drawing.fillStyle = mixed(colour('cold'), colour('hot'), share);
    drawing.fillRect(x, y, wide - 1, high - 1);
    if (wide < 26 || high < 16) return;
    drawing.fillStyle = share > 0.55 ? colour('on-hot') : colour('ink');
    drawing.textAlign = 'center';
    drawing.fillText(String(rank), x + (wide - 1) / 2, y + (high - 1) / 2);
  }

  // Draws a frame in a cell, `inside` pixels from the cell's border.
  frame(drawing, rank, dash, ink, inside) {
    const [x, y] = this.placeOfCell(this.cells[rank]);
    drawing.strokeStyle = ink;
    drawing.lineWidth = 2;
    drawing.setLineDash(dash);
    const [wide, high] = [this.cell.wide - 1 - 2 * inside, this.cell.high - 1 - 2 * inside];
    if (wide > 0 && high > 0) drawing.strokeRect(x + inside, y + inside, wide, high);
    else drawing.strokeRect(x, y, this.cell.wide - 1, this.cell.high - 1);
    drawing.setLineDash([]);
  }

  rankAt(x, y) {
    if (!this.groupSize) return null;
    const [across, down] = [Math.floor(x / this.groupSize.wide), Math.floor(y / this.groupSize.high)];
    const column = Math.floor((x - across * this.groupSize.wide - LABELS.left) / this.cell.wide);
    const row = Math.floor((y - down * this.groupSize.high - LABELS.top) / this.cell.high);
    if (across >= this.across) return null;
    return this.byCell.get(`${down * this.across + across} ${row} ${column}`) ?? null;
  }

  tip(x, y) {
    const rank = this.rankAt(x, y);
    if (rank === null) return null;
    return `rank ${count(rank)}: ${placeOf(this.checkpoint, rank)}\n${this.chosenColour.text}: ${this.chosenColour.say(this.values.each[rank])}`;
  }

  chooseRank(rank) {
    this.rank = rank;
    const { checkpoint } = this;
    const files = checkpoint.files.filter((file) => file.rank === rank);
    const place = checkpoint.axes.map((axis) => `${axis} ${checkpoint.ranks[rank][axis]}`).join(', ');
    const most = 6;
    at('rank').replaceChildren(
      make('b', { textContent: `Rank ${count(rank)}` }), ` ${place}. Wrote ${bytes(checkpoint.stored[rank])}: `,
      ...files.slice(0, most).map((file) => make('div', {}, make('span', { className: 'mono', textContent: file.path }), ` ${bytes(file.size)}`)),
      files.length > most ? `and ${count(files.length - most)} more files` : '',
      files.length ? '' : 'parts of files that other ranks completed');
    this.draw();
  }
}
