// -- how numbers and names are written --

const count = (number) => number.toLocaleString('en-US');

// A size in bytes, written with powers of 1000 as in the package's other outputs.
function bytes(number) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
  let unit = 0;
  while (number >= 999.5 && unit < units.length - 1) [number, unit] = [number / 1000, unit + 1];
  const digits = unit === 0 || number >= 100 ? 0 : number >= 10 ? 1 : 2;
  return `${number.toFixed(digits)} ${units[unit]}`;
}

function seconds(microseconds) {
  const value = microseconds / 1e6;
  if (value < 0.9995) return `${(value * 1000).toFixed(value < 0.00995 ? 2 : 0)} ms`;
  return `${value.toFixed(value < 99.95 ? 2 : 0)} s`;
}

// A number with six significant digits, as the package's other outputs write metrics.
const short = (number) => String(Number(number.toPrecision(6)));

const plural = (number, word) => `${count(number)} ${word}${number === 1 ? '' : 's'}`;
const range = (first, last) => (first === last ? count(first) : `${count(first)}–${count(last)}`);

function median(numbers) {
  const sorted = Float64Array.from(numbers).sort();
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}
