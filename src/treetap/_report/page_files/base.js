// SPDX-License-Identifier: Apache-2.0
// The report's page, first part: the data, the state, elements and numbers.
//
// All parts are put together, in the order of `PARTS` in `page.py`, into one function.
// All data is in the JSON block `data`. Names in it are untrusted: they become text nodes
// and nothing else.

const data = JSON.parse(document.getElementById("data").textContent);
const sites = data.sites;
const steps = data.steps;
const byId = (id) => document.getElementById(id);
const root = document.documentElement;
const table = byId("table"),
  rowsBox = byId("rows"),
  headBox = byId("head");
const panel = byId("panel"),
  filterBox = byId("filter"),
  badButton = byId("bad");

const state = {
  step: steps.length - 1, // which of the steps is shown
  matches: null, // the filter, as a function of a site
  onlyBad: false,
  sort: null, // {key, down}
  folded: new Set(), // nodes
  cursor: null, // the node that the keyboard is at
  open: null, // the site in the panel
  log: false,
};

// ---- Elements -----------------------------------------------------------------------

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  return filled(element, attributes, children);
}

function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return filled(element, attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  for (const child of children) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

// ---- Numbers ------------------------------------------------------------------------

// How far a number is from low to high; halves, as the whole way may be too far.
const share = (x, low, high) => (x / 2 - low / 2) / (high / 2 - low / 2 || 1);

const isNumber = (x) => typeof x === "number";
const grouped = new Intl.NumberFormat("en");

function numeral(x) {
  if (x === null || x === undefined) return "–";
  if (!isNumber(x)) return String(x).replace("inf", "∞").replace("nan", "NaN");
  if (x === 0) return "0";
  const size = Math.abs(x);
  let text;
  if (size >= 1e5 || size < 1e-3) {
    const [digits, power] = x.toExponential(1).split("e");
    text = `${digits}e${Number(power)}`;
  } else text = size >= 1000 ? grouped.format(Math.round(x)) : x.toPrecision(3);
  return text.replaceAll("-", "−");
}

// A large count in few letters: 6.1k.
const compact = new Intl.NumberFormat("en", {
  notation: "compact",
  maximumFractionDigits: 1,
});

const whole = (x) => (x === null || x === undefined ? "–" : grouped.format(x));

function percent(x) {
  if (!isNumber(x)) return "–";
  if (x > 0 && x < 0.001) return "<0.1 %";
  return `${(100 * x).toFixed(x === 0 || x >= 0.1 ? 0 : 1)} %`;
}

function memory(bytes) {
  let size = bytes;
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (size < 1000) return unit === "B" ? `${size} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1000;
  }
  return `${size.toFixed(1)} TB`;
}

function troubles(figures, count = whole) {
  const parts = [];
  if (figures && figures.nan) parts.push(`${count(figures.nan)} NaN`);
  if (figures && figures.infinite) parts.push(`${count(figures.infinite)} Inf`);
  if (!parts.length && figures && figures.bad) parts.push("not finite");
  return parts.join(", ");
}

const valueOf = (site, step = state.step) => (site.values && site.values[step]) || null;
const gradOf = (site, step = state.step) => (site.grads && site.grads[step]) || null;
const isWrong = (f) => Boolean(f && (f.nan || f.infinite || f.bad));
const isBad = (site) => isWrong(valueOf(site)) || isWrong(gradOf(site));

function ratio(site, step) {
  const value = valueOf(site, step),
    grad = gradOf(site, step);
  if (!value || !grad || !isNumber(grad.norm) || !value.norm) return null;
  return isNumber(value.norm) ? grad.norm / value.norm : null;
}
