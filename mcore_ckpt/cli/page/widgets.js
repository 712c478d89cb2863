// -- parts of the page that several sections use --

const at = (id) => document.getElementById(id);

// Makes an element. Texts become text nodes, because a name in a checkpoint may look like HTML.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function options(select, choices, onChange) {
  select.replaceChildren(...Object.entries(choices).map(([value, text]) => make('option', { value, textContent: text })));
  select.onchange = () => onChange(select.value);
}

// Keeps the colours of the style, because the browser looks them up slowly. A new colour scheme clears the map.
const colours = new Map();

function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

// The colour of thing `number` of `all`. Up to eight are easy to tell apart; for more, take the rainbow's colours.
function distinct(number, all) {
  if (all <= 8) return colour(`c${number}`);
  return `hsl(${(number * 360) / all} ${colour('tint')} ${colour('shade')})`;
}

// A colour between two others: `share` is 0 for `from`, and 1 for `to`.
const mixed = (from, to, share) => `color-mix(in srgb, ${to} ${(100 * share).toFixed(1)}%, ${from})`;

// Prepares a canvas of this size in CSS pixels, and returns its context.
function context(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const drawing = canvas.getContext('2d');
  drawing.setTransform(scale, 0, 0, scale, 0, 0);
  drawing.clearRect(0, 0, width, height);
  drawing.font = '12px system-ui, sans-serif';
  drawing.textBaseline = 'middle';
  return drawing;
}

// Shows a text next to the pointer while the pointer is over a canvas. `textAt(x, y)` returns null for no text.
function tips(canvas, textAt) {
  const tip = at('tip');
  canvas.onpointermove = (event) => {
    const text = textAt(event.offsetX, event.offsetY);
    tip.hidden = text === null;
    if (text === null) return;
    tip.textContent = text;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - width - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - height - 8)}px`;
  };
  canvas.onpointerleave = () => (tip.hidden = true);
}

// A list of any length: only the rows that can be seen are in the document.
class VirtualList {
  constructor(element, rowHeight, tag, draw) {
    Object.assign(this, { element, rowHeight, tag, draw, length: 0, rows: new Map() });
    this.space = make('div');
    element.replaceChildren(this.space);
    element.onscroll = () => this.update();
    new ResizeObserver(() => this.update()).observe(element);
  }

  show(length) {
    this.length = length;
    this.space.style.height = `${length * this.rowHeight}px`;
    this.rows.forEach((row) => row.remove());
    this.rows.clear();
    this.update();
  }

  reveal(index) {
    const top = index * this.rowHeight;
    if (top >= this.element.scrollTop && top + this.rowHeight <= this.element.scrollTop + this.element.clientHeight) return;
    this.element.scrollTop = top - this.element.clientHeight / 2;
  }

  update() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - 4);
    const last = Math.min(this.length, Math.ceil((this.element.scrollTop + this.element.clientHeight) / this.rowHeight) + 4);
    for (const [index, row] of this.rows) {
      if (index < first || index >= last) row.remove(), this.rows.delete(index);
    }
    for (let index = first; index < last; index++) {
      if (this.rows.has(index)) continue;
      const row = make(this.tag, { className: 'row' });
      row.style.top = `${index * this.rowHeight}px`;
      row.style.height = `${this.rowHeight}px`;
      this.draw(row, index);
      this.rows.set(index, row);
      this.element.append(row);
    }
  }
}

// An element with a name. If the column is too narrow, only the end of the name is shown.
const nameCell = (name) => make('span', { className: 'name', title: name }, make('bdi', { textContent: name }));

function meter(share) {
  const filled = make('div');
  filled.style.width = `${100 * share}%`;
  return make('div', { className: 'meter' }, filled);
}

// Buttons for the first `most` ranks, and the number of further ranks.
function rankButtons(ranks, onClick, most = 12) {
  const buttons = ranks.slice(0, most).map((rank) =>
    make('button', { textContent: count(rank), title: `show rank ${rank}`, onclick: () => onClick(rank) }));
  const more = ranks.length > most ? [make('span', { textContent: `and ${count(ranks.length - most)} more` })] : [];
  return make('span', { className: 'ranks' }, ...buttons, ...more);
}
