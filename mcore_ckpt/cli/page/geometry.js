// -- which elements of a global tensor a shard has: the same arithmetic as mcore_ckpt/sharding/regions.py --

const product = (numbers) => numbers.reduce((all, number) => all * number, 1);

function intersect(a, b) {
  const offset = a.offset.map((at, axis) => Math.max(at, b.offset[axis]));
  const shape = offset.map((at, axis) => Math.min(a.offset[axis] + a.shape[axis], b.offset[axis] + b.shape[axis]) - at);
  return shape.some((length) => length <= 0) ? null : { offset, shape };
}

// Splits elements [start, stop) of a row-major tensor into boxes, in order.
function flatToBoxes(shape, start, stop) {
  if (start >= stop) return [];
  if (shape.length === 0) return [{ offset: [], shape: [] }];
  if (shape.length === 1) return [{ offset: [start], shape: [stop - start] }];
  const rest = shape.slice(1);
  const row = product(rest);
  const inRow = (index, from, to) =>
    flatToBoxes(rest, from, to).map((box) => ({ offset: [index, ...box.offset], shape: [1, ...box.shape] }));
  let first = Math.floor(start / row);
  const last = Math.floor((stop - 1) / row);
  if (first === last) return inRow(first, start - first * row, stop - first * row);
  const boxes = [];
  if (start % row) boxes.push(...inRow(first, start - first * row, row)), (first += 1);
  const whole = Math.floor(stop / row);
  if (whole > first) boxes.push({ offset: [first, ...rest.map(() => 0)], shape: [whole - first, ...rest] });
  if (stop % row) boxes.push(...inRow(whole, 0, stop - whole * row));
  return boxes;
}

// The boxes of a flat range of a region, each in the local and in the global tensor.
function boxesOf(region, start, stop) {
  const found = [];
  for (const cut of flatToBoxes(region.localShape, start, stop)) {
    for (const piece of region.pieces) {
      const local = intersect(cut, { offset: piece.localOffset, shape: piece.shape });
      if (local === null) continue;
      const offset = local.offset.map((at, axis) => at - piece.localOffset[axis] + piece.globalOffset[axis]);
      found.push({ local, global: { offset, shape: local.shape } });
    }
  }
  return found;
}

// The extent [start, length] of a box along an axis. The drawing shows axis 0 downwards and axis 1 to the right.
const spanOf = (box, axis) => (axis < box.offset.length ? [box.offset[axis], box.shape[axis]] : [0, 1]);

// The part of a row of the global tensor in a box, as positions [first, last] in the row-major local tensor; null if
// the row is not in the box.
function rowInLocal(region, box, row) {
  const [start, length] = spanOf(box.global, 0);
  if (row < start || row >= start + length) return null;
  const strides = region.localShape.map((_, axis) => product(region.localShape.slice(axis + 1)));
  const first = box.local.offset.map((at, axis) => (axis === 0 ? at + row - start : at));
  const last = first.map((at, axis) => (axis === 0 ? at : at + box.local.shape[axis] - 1));
  const position = (index) => index.reduce((sum, at, axis) => sum + at * strides[axis], 0);
  return [position(first), position(last)];
}
