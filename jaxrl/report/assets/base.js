// What the parts of the page share. All parts are one module: they are inlined one after the other.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

/** Attributes and children of an element; what comes from a run is only ever text. */
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Four digits, and thousands apart: 0.06531, 3,618, 1.621e+9; a dash where there is none. */
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  const rounded = Number(value.toPrecision(4));
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return rounded.toExponential();
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(rounded);
}

/** Microseconds as a reader says them. */
function duration(us) {
  if (us < 1000) return `${us} µs`;
  if (us < 1e6) return `${number(us / 1e3)} ms`;
  return us < 120e6 ? `${number(us / 1e6)} s` : `${number(us / 60e6)} min`;
}

/** Round numbers in [low, high], about `count` of them. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let i = Math.ceil(low / size); i * size <= high + size * 1e-9; i++) {
    found.push(Number((i * size).toPrecision(12)));
  }
  return found;
}

/** The index of the sorted value that is nearest. */
function nearest(sorted, value) {
  const at = firstAfter(sorted, value);
  if (at === 0) return 0;
  if (at === sorted.length) return at - 1;
  return value - sorted[at - 1] <= sorted[at] - value ? at - 1 : at;
}

/** The index of the first sorted value above `value`. */
function firstAfter(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** A form control by its name. */
function control(name) {
  return document.querySelector(`[name="${name}"]`);
}
