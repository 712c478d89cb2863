// -- the size of each kind of file, and of each file --

class FileSection {
  constructor(page) {
    this.page = page;
    this.list = new VirtualList(at('file-list'), 28, 'button', (row, index) => this.drawRow(row, this.found[index]));
    at('file-search').oninput = () => this.search();
    options(at('file-order'), { manifest: 'as in the manifest', size: 'largest first', rank: 'rank' }, () => this.search());
  }

  show(checkpoint) {
    this.checkpoint = checkpoint;
    this.largest = checkpoint.files.reduce((most, file) => Math.max(most, file.size), 1);
    at('total').textContent = `${bytes(checkpoint.size)} in ${plural(checkpoint.files.length, 'file')}`;
    at('sizes').replaceChildren(...this.shares());
    at('parts').replaceChildren(...this.bars(checkpoint.nbytesByKind().map(([kind, size]) => [kind, '', size])));
    this.search();
  }

  // The number and size of the files of each kind.
  shares() {
    const kinds = new Map();
    for (const file of this.checkpoint.files) {
      const [files, size] = kinds.get(file.kind) ?? [0, 0];
      kinds.set(file.kind, [files + 1, size + file.size]);
    }
    return this.bars([...kinds].map(([kind, [files, size]]) => [kind, plural(files, 'file'), size]));
  }

  // Bars for [name, remark, size], the largest first, in proportion to the whole checkpoint.
  bars(rows) {
    const all = Math.max(1, this.checkpoint.size);
    return rows.sort((a, b) => b[2] - a[2]).map(([name, remark, size]) =>
      make('div', { className: 'share' },
        make('div', { className: 'label' },
          make('span', { textContent: name }),
          make('span', { className: 'quiet', textContent: remark }),
          make('b', { textContent: bytes(size) })),
        meter(Math.min(1, size / all))));
  }

  search() {
    const words = at('file-search').value.toLowerCase().split(/\s+/).filter(Boolean);
    this.found = this.checkpoint.files.filter((file) => words.every((word) => file.path.toLowerCase().includes(word)));
    const order = { size: (a, b) => b.size - a.size, rank: (a, b) => a.rank - b.rank }[at('file-order').value];
    if (order) this.found.sort(order);
    this.list.element.scrollTop = 0;
    this.list.show(this.found.length);
  }

  drawRow(row, file) {
    row.onclick = () => this.page.chooseRank(file.rank);
    row.append(
      nameCell(file.path),
      make('span', { className: 'word quiet', textContent: file.kind }),
      make('span', { className: 'number quiet', textContent: `rank ${count(file.rank)}` }),
      meter(file.size / this.largest),
      make('span', { className: 'number', textContent: bytes(file.size) }));
  }
}
