// -- how the checkpoint (A) differs from another one (B), if they were compared; in the words of `mcore-ckpt diff` --

const DIFFERENCE_ROW = 28;
const DIFFERENCE_ROWS_SEEN = 10;

class DifferenceSection {
  constructor(page) {
    this.page = page;
    this.tensors = this.listAt('difference-list', 'button', (row, index) => this.drawTensor(row, this.diff.tensors[index]));
    this.values = this.listAt('value-list', 'div', (row, index) => this.drawValue(row, this.diff.values[index]));
    at('difference-heads').append(...this.tensorCells('tensor', ['kind', 'problem', 'A', 'B', 'differing', 'max abs', 'max rel']));
    at('value-heads').append(...this.valueCells('other state', 'A', 'B'));
  }

  listAt(id, tag, draw) {
    return new VirtualList(at(id), DIFFERENCE_ROW, tag, draw);
  }

  // `comparedWith` is null if there was no comparison. `onlyInB` are the roles that only checkpoint B has.
  show(checkpoint, comparedWith, onlyInB) {
    at('differences').hidden = comparedWith === null;
    if (comparedWith === null) return;
    this.diff = checkpoint.diff ?? { with: comparedWith, compared: 0, tensors: [], values: [], notes: [] };
    this.numbers = new Map(checkpoint.tensors.map((name, number) => [name, number]));
    const { tensors, values, notes } = this.diff;
    at('compared-with').textContent = checkpoint.diff === null ? `only in A: role ${checkpoint.role}` : this.verdict();
    at('difference-sides').replaceChildren(...this.sides(checkpoint.path, this.diff.with));
    const said = [...onlyInB.map((role) => `only in B: role ${role}`), ...notes.map((note) => `note: ${note}`)];
    at('difference-notes').replaceChildren(...said.map((textContent) => make('p', { className: 'small', textContent })));
    this.showList(this.tensors, 'difference-table', tensors.length);
    this.showList(this.values, 'value-table', values.length);
  }

  verdict() {
    const { compared, tensors, values } = this.diff;
    const verdict = tensors.length || values.length
      ? `${plural(tensors.length, 'tensor')} and ${plural(values.length, 'value')} differ`
      : 'the same';
    return `${verdict}; ${plural(compared, 'tensor')} compared`;
  }

  sides(left, right) {
    return [['A', `${left} (this page)`], ['B', right]].map(([letter, path]) =>
      make('div', {}, make('b', { textContent: letter }), ` ${path}`));
  }

  showList(list, table, length) {
    at(table).hidden = length === 0;
    list.element.style.height = `${DIFFERENCE_ROW * Math.min(length, DIFFERENCE_ROWS_SEEN) + 2}px`;
    list.show(length);
  }

  drawTensor(row, [name, kind, problem, left, right, elements, differing, maxAbs, maxRel]) {
    const tensor = this.numbers.get(name);
    row.disabled = tensor === undefined;
    row.title = row.disabled ? 'only in B' : 'show where this tensor is';
    row.onclick = () => this.page.chooseTensor(tensor, 0, kind);
    const amount = (number) => (number === null ? 'inf' : number ? String(Number(number.toPrecision(3))) : '');
    const shown = differing ? `${count(differing)} of ${count(elements)}` : '';
    row.append(...this.tensorCells(name, [kind, problem, left, right, shown, amount(maxAbs), amount(maxRel)]));
  }

  tensorCells(name, texts) {
    const classes = ['word quiet', 'word', 'side-of', 'side-of', 'amount', 'number', 'number last'];
    return [nameCell(name), ...texts.map((textContent, at) => make('span', { className: classes[at], textContent, title: textContent }))];
  }

  drawValue(row, [name, left, right]) {
    row.append(...this.valueCells(name, left ?? '-', right ?? '-'));
  }

  valueCells(name, ...sides) {
    return [nameCell(name), ...sides.map((textContent) => make('span', { className: 'value', textContent, title: textContent }))];
  }
}
