// Elements and words. Whatever comes from a record becomes text nodes, never markup.

const byId = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const span = (kind, ...children) => make("span", { class: kind }, ...children);
const isTextSelected = () => String(getSelection()) !== "";

// Whether an element has not yet been drawn for this; it is taken to be from now on.
function isStale(element, ...state) {
  const now = state.join();
  if (element.dataset.drawn === now) return false;
  element.dataset.drawn = now;
  return true;
}

// Text whose {words} are explained where the pointer rests, and whose options are code with values.
function marked(text) {
  return text.split(/(\{[^}]+\}|--[a-z-]+(?: [a-z_]+(?:,[a-z_]+)+)?)/).map((part, i) => {
    if (i % 2 === 0) return part;
    if (part.startsWith("--")) return make("code", {}, part);
    const words = part.slice(1, -1);
    return make("span", { class: "term", title: RECORD.terms[words] }, words);
  });
}

// A token, with a direction of its own: one of another script does not reorder its neighbours.
const tokenElement = (word) => make("bdi", { class: "token" }, word);

// A weight without its leading zero: `.17`, `1.00`, `nan`.
function shortWeight(weight, digits = 2) {
  return Number.isNaN(weight) ? "nan" : weight.toFixed(digits).replace(/^0(?=\.)/, "");
}

// The shortest text that reads back as the same number of 32 bits.
function exactText(weight) {
  const digits = range(1, 8).find((n) => Math.fround(weight.toPrecision(n)) === weight) ?? 9;
  return String(Number(weight.toPrecision(digits)));
}

// A number in four digits, with a minus sign.
function numberText(number) {
  if (Number.isNaN(number)) return "not a number";
  return String(Number(number.toPrecision(4))).replace("-", "−").replace("Infinity", "∞");
}

const rangeText = (from, to) => (from === to ? String(from) : `${from}–${to}`);
const range = (from, count) => Array.from({ length: count }, (_, i) => from + i);
const between = (least, most, number) => Math.max(least, Math.min(most, number));
