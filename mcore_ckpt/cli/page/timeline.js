// -- when each rank did what in the save --

const PARTS = ['plan', 'copy', 'write', 'export'];
const PHASE_TEXT = {
  plan: 'plan, and the ranks\u2019 first round',
  copy: 'copy',
  write: 'write',
  export: 'export to HuggingFace',
  wait: 'wait for other ranks',
  commit: 'commit (rank 0)',
};
const TIMELINE = { row: 18, left: 62, right: 14, top: 24 };

class TimelineSection {
  constructor(page) {
    this.page = page;
    const box = at('timeline');
    box.onscroll = () => this.draw();
    new ResizeObserver(() => this.draw()).observe(box);
    const canvas = at('timeline-canvas');
    canvas.onclick = (event) => {
      const rank = this.rankAt(event.offsetY);
      if (rank !== null) page.chooseRank(rank);
    };
    tips(canvas, (_, y) => this.tip(y));
  }

  show(checkpoint) {
    Object.assign(this, { checkpoint, timeline: checkpoint.timeline, rank: 0 });
    const isThere = this.timeline !== null;
    for (const id of ['legend', 'timeline', 'phases', 'order-choice']) at(id).hidden = !isThere;
    at('timeline-note').textContent = isThere
      ? 'All ranks are aligned where their first round ended, which is nearly one moment; zero is the first call of save. '
        + 'What follows the manifest (its sync, the rename) is not in it.'
      : '';
    if (!isThere) {
      at('timeline-summary').textContent =
        'This checkpoint has no timeline: it was not written by a save, or by a save of an older version.';
      return;
    }
    this.parts = PARTS.filter((part) => this.timeline[part]);
    // When each rank called `save`, assuming that the first round ended on all ranks at the same moment.
    const planned = this.timeline.plan[1];
    const latest = planned.reduce((a, b) => Math.max(a, b), 0);
    this.called = planned.map((end) => latest - end);
    this.manifest = this.called[0] + this.timeline.commit[1];
    const last = this.parts.at(-1) === 'export' ? 'export' : 'write';
    this.done = this.timeline[last][1].map((end, rank) => this.called[rank] + end);
    this.end = this.done.reduce((a, b) => Math.max(a, b), this.manifest);
    options(at('order'), { rank: 'rank', slowest: 'slowest first' }, (order) => this.sort(order));
    this.legend();
    this.summarize();
    this.sort('rank');
  }

  sort(order) {
    this.order = this.checkpoint.ranks.map((_, rank) => rank);
    if (order === 'slowest') this.order.sort((a, b) => this.done[b] - this.done[a]);
    at('timeline').scrollTop = 0;
    this.draw();
  }

  legend() {
    at('legend').replaceChildren(...[...this.parts, 'wait', 'commit'].map((part) => {
      const key = make('i');
      key.style.background = `var(--${part})`;
      return make('li', {}, key, PHASE_TEXT[part]);
    }));
  }

  // How long a part took on each rank. The commit is measured on rank 0 alone.
  durations(part) {
    return this.timeline[part][0].map((start, rank) => this.timeline[part][1][rank] - start);
  }

  summarize() {
    const rows = this.parts.map((part) => {
      const each = this.durations(part);
      const most = each.indexOf(each.reduce((a, b) => Math.max(a, b), 0));
      return [PHASE_TEXT[part], seconds(median(each)), seconds(each[most]), `rank ${count(most)}`];
    });
    rows.push([PHASE_TEXT.commit, '', seconds(this.timeline.commit[1] - this.timeline.commit[0]), 'rank 0']);
    const head = make('tr', {}, ...['part', 'median', 'longest', 'on'].map((text) => make('th', { textContent: text })));
    at('phases').replaceChildren(head, ...rows.map((cells) => make('tr', {}, ...cells.map((textContent) => make('td', { textContent })))));
    const write = this.durations('write');
    const speed = (rank) => (write[rank] ? this.timeline.bytes[rank] / write[rank] / 1000 : 0);
    const slowest = this.done.indexOf(this.done.reduce((a, b) => Math.max(a, b), 0));
    const speeds = median(write.map((_, rank) => speed(rank)));
    const stall = this.timeline.stall;
    const held = stall ? ` Training was held up for ${seconds(median(stall))} (at most ${seconds(stall.reduce((a, b) => Math.max(a, b), 0))}).` : '';
    at('timeline-summary').textContent =
      `All was on the disk, and the manifest made, after ${seconds(this.manifest)}. Rank ${count(slowest)} was last: `
      + `${bytes(this.timeline.bytes[slowest])} at ${speed(slowest).toFixed(2)} GB/s (median of all ranks ${speeds.toFixed(2)} GB/s).${held}`;
  }

  draw() {
    const box = at('timeline');
    const width = box.clientWidth;
    if (!width || !this.order || !this.timeline) return;
    const rows = this.order.length * TIMELINE.row;
    const visible = Math.min(rows + TIMELINE.top + 4, 420);
    const drawing = context(at('timeline-canvas'), width, visible);
    // The canvas stays in view. The margin below it only makes room to scroll.
    at('timeline-canvas').style.marginBottom = `${Math.max(0, rows + TIMELINE.top + 4 - visible)}px`;
    this.scale = (width - TIMELINE.left - TIMELINE.right) / this.end;
    const first = Math.floor(box.scrollTop / TIMELINE.row);
    const last = Math.min(this.order.length, first + Math.ceil(visible / TIMELINE.row) + 1);
    this.shift = TIMELINE.top - box.scrollTop;
    const marks = this.marks(width);
    drawing.strokeStyle = colour('line');
    drawing.lineWidth = 1;
    for (const time of marks) this.drawMark(drawing, time, visible);
    for (let row = first; row < last; row++) this.drawRank(drawing, this.order[row], this.shift + row * TIMELINE.row);
    this.drawAxis(drawing, width, marks);
  }

  drawRank(drawing, rank, y) {
    const bar = (start, end, part, top = 3, high = TIMELINE.row - 6) => {
      drawing.fillStyle = colour(part);
      const x = TIMELINE.left + (this.called[rank] + start) * this.scale;
      drawing.fillRect(x, y + top, Math.max(1, (end - start) * this.scale), high);
    };
    if (rank === this.rank) {
      drawing.fillStyle = colour('soft');
      drawing.fillRect(0, y, TIMELINE.left + this.end * this.scale + TIMELINE.right, TIMELINE.row);
    }
    const finished = this.done[rank] - this.called[rank];
    bar(finished, this.manifest - this.called[rank], 'wait', 7, 4);
    for (const part of this.parts) {
      const [start, end] = [this.timeline[part][0][rank], this.timeline[part][1][rank]];
      // Copying and writing overlap, so draw the copy in the upper half.
      if (part === 'copy') bar(start, end, part, 3, (TIMELINE.row - 6) / 2);
      else if (part === 'write') this.drawWrite(bar, rank, start, end);
      else bar(start, end, part);
    }
    if (rank === 0) bar(this.timeline.commit[0], this.timeline.commit[1], 'commit', 6, 6);
    drawing.fillStyle = colour(rank === this.rank ? 'ink' : 'quiet');
    drawing.textAlign = 'right';
    drawing.fillText(`rank ${rank}`, TIMELINE.left - 8, y + TIMELINE.row / 2);
  }

  drawWrite(bar, rank, start, end) {
    const copied = Math.min(end, this.timeline.copy[1][rank]);
    if (copied > start) bar(start, copied, 'write', 3 + (TIMELINE.row - 6) / 2, (TIMELINE.row - 6) / 2);
    bar(Math.max(start, copied), end, 'write');
  }

  // The times to mark: multiples of a round step, at least about 110 pixels apart.
  marks(width) {
    const rough = this.end / Math.max(2, Math.floor(width / 110));
    const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough) ?? 10 * power;
    return Array.from({ length: Math.floor(this.end / step) + 1 }, (_, number) => number * step);
  }

  drawMark(drawing, time, height) {
    const x = Math.round(TIMELINE.left + time * this.scale) + 0.5;
    drawing.beginPath();
    drawing.moveTo(x, TIMELINE.top - 4);
    drawing.lineTo(x, height);
    drawing.stroke();
  }

  drawAxis(drawing, width, marks) {
    drawing.fillStyle = colour('card');
    drawing.fillRect(0, 0, width, TIMELINE.top - 2);
    drawing.fillStyle = colour('quiet');
    for (const time of marks) {
      drawing.textAlign = time === 0 ? 'left' : 'center';
      drawing.fillText(time === 0 ? '0' : seconds(time), TIMELINE.left + time * this.scale, 11);
    }
  }

  rankAt(y) {
    if (!this.order || y < TIMELINE.top) return null;
    return this.order[Math.floor((y - this.shift) / TIMELINE.row)] ?? null;
  }

  tip(y) {
    const rank = this.rankAt(y);
    if (rank === null) return null;
    const lines = this.parts.map((part) => {
      const [start, end] = [this.timeline[part][0][rank], this.timeline[part][1][rank]];
      return `${part}: ${seconds(start)} to ${seconds(end)} (${seconds(end - start)})`;
    });
    return [`rank ${count(rank)}, since its own call of save`, ...lines, `${bytes(this.timeline.bytes[rank])} written`].join('\n');
  }

  chooseRank(rank) {
    this.rank = rank;
    this.draw();
  }
}
