// Elements and words. Whatever comes from a record becomes text nodes, never markup.

const byId = (id) => document.getElementById(id);

// An element with attributes and children; strings become text. `undefined`, `null` and `false` attributes are left out.
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(key, "");
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function makeSvg(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// Its own direction, so that a token of another script does not reorder its neighbours.
const tokenElement = (label) => make("bdi", { class: "token" }, label);

// A share without its leading zero: `.17`, `1.00`, `nan`.
function shareText(share, digits = 2) {
  return Number.isNaN(share) ? "nan" : share.toFixed(digits).replace(/^0(?=\.)/, "");
}

// The shortest text that reads back as the same number of 32 bits.
function exactText(share) {
  for (let digits = 1; digits < 9; digits++) {
    const text = share.toPrecision(digits);
    if (Math.fround(Number(text)) === share) return String(Number(text));
  }
  return String(Number(share.toPrecision(9)));
}

// A scale's end in about three digits: `.97`, `.031`, `.00031`, `1`.
function tickText(share) {
  if (share === 0 || share >= 1) return String(Number(share.toPrecision(2)));
  return share < 1e-4 ? share.toExponential(0) : String(Number(share.toPrecision(2))).replace(/^0/, "");
}

const rangeText = (from, to) => (from === to ? String(from) : `${from}–${to}`);
