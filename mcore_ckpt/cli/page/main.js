// -- the page: unpacks the data and tells the sections what is chosen --

async function unpacked() {
  const packed = Uint8Array.from(atob(at('data').textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).json();
}

class Page {
  constructor(data) {
    this.data = data;
    this.checkpoints = data.roles.map((role) => new Checkpoint(role));
    this.tensors = new TensorSection(this);
    this.ranks = new RankSection(this);
    this.timeline = new TimelineSection(this);
    this.files = new FileSection(this);
    this.differences = new DifferenceSection(this);
    options(at('role'), Object.fromEntries(data.roles.map(({ role }, number) => [number, role])), (number) => this.show(Number(number)));
    at('role-choice').hidden = data.roles.length < 2;
    const redraw = () => {
      colours.clear();
      [this.tensors, this.ranks, this.timeline].forEach((section) => section.draw());
    };
    window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
    this.show(0);
  }

  show(number) {
    const checkpoint = this.checkpoints[number];
    document.title = `step ${this.data.step} of ${checkpoint.role}`;
    at('title').textContent = `Step ${this.data.step} of ${checkpoint.role}`;
    at('path').textContent = checkpoint.path;
    at('facts').replaceChildren(...Object.entries(this.facts(checkpoint)).map(([term, text]) =>
      make('div', {}, make('dt', { textContent: term }), make('dd', { textContent: text }))));
    this.ranks.show(checkpoint);
    this.timeline.show(checkpoint);
    this.files.show(checkpoint);
    this.tensors.show(checkpoint);
    this.differences.show(checkpoint, this.data.comparedWith, this.data.onlyInB);
  }

  facts({ topology, created, versions, contents, metrics, roles, tensors, size }) {
    // Leave out the sizes that follow from the other sizes.
    const usual = { world_size: topology.world_size, etp: topology.tp, edp: topology.ep > 1 ? 1 : topology.edp };
    const sizes = Object.entries(topology).filter(([axis, length]) => length > 1 && length !== usual[axis]);
    const measured = Object.entries(metrics).sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, value]) => `${name} ${short(value)}`);
    return {
      layout: [plural(topology.world_size, 'rank'), ...sizes.map(([axis, length]) => `${axis.replaceAll('_', ' ')} ${length}`)].join(', '),
      size: bytes(size),
      tensors: count(tensors.length),
      holds: contents.join(', ') || 'files of its program',
      ...(measured.length ? { metrics: measured.join(', ') } : {}),
      saved: created.replace('T', ' ').replace('+00:00', ' UTC'),
      'roles of the step': roles.join(', '),
      'saved with': Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(', ') || 'not known',
    };
  }

  chooseTensor(tensor, row, kind) {
    this.tensors.choose(tensor, row, kind);
  }

  chooseRow(row) {
    this.tensors.chooseRow(row);
  }

  chooseRank(rank) {
    this.ranks.chooseRank(rank);
    this.timeline.chooseRank(rank);
  }

  showHolders(holders) {
    this.ranks.showHolders(holders);
  }
}

unpacked().then((data) => {
  at('loading').hidden = true;
  at('page').hidden = false;
  window.page = new Page(data); // for the console, and for tests
  document.body.dataset.opened = performance.now();
}).catch((error) => {
  at('loading').dataset.error = String(error);
  at('loading').textContent = `This page could not be shown (${error}). Open it with a browser of 2023 or newer.`;
  throw error;
});
