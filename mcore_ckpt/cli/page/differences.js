// -- how the checkpoint differs from another one, if they were compared --

class DifferenceSection {
  constructor(page) {
    this.page = page;
    this.list = new VirtualList(at('difference-list'), 28, 'button', (row, index) => this.drawRow(row, this.rows[index]));
  }

  // `rows` are [tensor, kind, largest difference or null, how many values differ]; undefined if there was no comparison.
  show(checkpoint, comparedWith, rows) {
    at('differences').hidden = comparedWith === null;
    if (comparedWith === null) return;
    this.rows = rows ?? [];
    this.numbers = new Map(checkpoint.tensors.map((name, number) => [name, number]));
    const found = this.rows.length ? plural(this.rows.length, 'difference') : 'no difference';
    at('compared-with').textContent = `${found} from ${comparedWith}`;
    this.list.show(this.rows.length);
  }

  drawRow(row, [name, kind, largest, values]) {
    const tensor = this.numbers.get(name);
    if (tensor !== undefined) row.onclick = () => this.page.chooseTensor(tensor, 0, kind);
    row.append(
      nameCell(name),
      make('span', { className: 'word quiet', textContent: kind }),
      make('span', { className: 'number', textContent: plural(values, 'value') }),
      make('span', { className: 'number', textContent: largest === null ? '' : `up to ${largest.toPrecision(3)}` }));
  }
}
