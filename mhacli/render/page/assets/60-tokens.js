// The two texts side by side, and what flows between them.

// Lists of more parts than this show those around the chosen one, and the strongest.
const MOST_LISTED = 32, LISTED = 22;
const lists = { query: [], key: [], svg: null };

function buildTokens() {
  const column = (side, title) => {
    const id = `${side === "query" ? "queries" : "keys"}`;
    const list = make("ol", { id, role: "listbox", "aria-label": title, class: "tokens" });
    list.addEventListener("keydown", (event) => pressOnToken(event, side));
    list.addEventListener("pointerleave", () => point(null));
    list.addEventListener("focusout", () => point(null));
    return make("div", { class: "column" }, make("h3", {}, title), list);
  };
  lists.svg = makeSvg("svg", { class: "lines", "aria-hidden": "true" });
  const between = make("div", { class: "between" }, lists.svg);
  const columns = make("div", { class: "columns" }, column("query", "queries"), between, column("key", "keys"));
  byId("tokens-area").append(columns, make("p", { id: "tokens-note", class: "note" }));
}

// The query or key whose lines are drawn, and whether its list must stay as it is under the pointer.
function focusOfTokens() {
  if (pointed === null) return { side: choice.side, place: choice[choice.side], stays: false };
  if (pointed.side === "cell") return { side: "query", place: pointed.query.from, stays: false };
  return { side: pointed.side, place: pointed.place, stays: true };
}

function drawTokens() {
  const focus = focusOfTokens(), other = focus.side === "query" ? "key" : "query";
  const entries = focus.side === "query" ? rowOf(focus.place) : columnOf(focus.place);
  const open = entries.filter((entry) => entry.share !== FORBIDDEN);
  const drawn = choice.hideSinks ? open.filter((entry) => !isOfSink(focus, entry)) : open;
  const largest = drawn.reduce((most, entry) => Math.max(most, entry.share || 0), 0);
  if (!focus.stays) fillList(focus.side, listedAround(focus));
  fillList(other, listedBeside(other, entries, focus.place));
  markFocus(focus);
  markShares(other, focus, entries, largest);
  drawLines(focus, other, entries, largest);
  tellTokens(focus, open);
}

function isOfSink(focus, entry) {
  const place = focus.side === "query" ? entry.place : focus.place;
  return chosen.sinks.includes(place);
}

const range = (from, count) => Array.from({ length: count }, (_, i) => from + i);

function listedAround({ side, place }) {
  const count = wordsOf(side).length;
  if (count <= MOST_LISTED) return range(0, count);
  return range(Math.max(0, Math.min(count - LISTED, place - (LISTED >> 1))), LISTED);
}

// The strongest of them and the nearest, in the order of the text.
function listedBeside(side, entries, near) {
  const count = wordsOf(side).length;
  if (count <= MOST_LISTED) return range(0, count);
  const strongest = entries.filter((entry) => entry.share > 0).sort((a, b) => b.share - a.share).slice(0, LISTED - 6);
  const listed = new Set(strongest.map((entry) => entry.place));
  for (let step = 0; listed.size < LISTED && step < 2 * count; step++) {
    const place = near + (step % 2 ? -(step + 1) / 2 : step / 2);
    if (place >= 0 && place < count) listed.add(place);
  }
  return [...listed].sort((a, b) => a - b);
}

// New elements only where other places are listed: the one that has the focus must not vanish.
function fillList(side, places) {
  const names = places.join(), words = wordsOf(side);
  if (lists[side].words === words && lists[side].names === names) return;
  const rows = places.map((place) => makeToken(side, place)), shown = [];
  rows.forEach((row, i) => {
    if (i && places[i] > places[i - 1] + 1) shown.push(make("li", { class: "gap", role: "presentation" }, "⋯"));
    shown.push(row);
  });
  byId(side === "query" ? "queries" : "keys").replaceChildren(...shown);
  lists[side] = { names, words, places, rows };
}

function makeToken(side, place) {
  const word = wordsOf(side)[place], parts = chosen.isOfBlocks ? [word, ""] : [place, tokenElement(word)];
  const token = make("li", { role: "option", tabindex: -1, "data-place": place, title: word });
  token.append(make("span", { class: "place" }, parts[0]), make("span", { class: "words" }, parts[1]), make("span", { class: "share" }));
  token.addEventListener("pointerenter", () => point({ side, place }));
  token.addEventListener("focus", () => point({ side, place }));
  token.addEventListener("click", () => String(getSelection()) || keepToken(side, place)); // not while somebody copies text
  return token;
}

const keepToken = (side, place) => choose({ [side]: place, side, ...(side === "query" ? { key: strongestKey(place) } : {}) });

function markFocus(focus) {
  for (const side of ["query", "key"]) {
    const { places, rows } = lists[side], reachable = Math.max(0, places.indexOf(choice[side]));
    rows.forEach((row, i) => {
      row.classList.toggle("current", side === focus.side && places[i] === focus.place);
      row.classList.toggle("of-sink", side === "key" && chosen.sinks.includes(places[i]));
      row.setAttribute("aria-selected", places[i] === choice[side] && side === choice.side);
      row.tabIndex = i === reachable ? 0 : -1;
      if (side === focus.side) markShare(row, null);
    });
  }
}

function markShares(side, focus, entries, largest) {
  const found = new Map(entries.map((entry) => [entry.place, entry]));
  lists[side].places.forEach((place, i) => {
    const entry = found.get(place) ?? null;
    markShare(lists[side].rows[i], entry, largest, entry && isOfSink(focus, entry));
  });
}

function markShare(row, entry, largest = 1, isSink = false) {
  const isClosed = entry?.share === FORBIDDEN, isNone = entry === null || isClosed;
  const length = isNone || !(entry.share > 0) || (isSink && choice.hideSinks) ? 0 : Math.min(1, entry.share / largest);
  row.style.setProperty("--part", `${(100 * length).toFixed(1)}%`);
  row.classList.toggle("closed", isClosed);
  row.lastChild.textContent = isClosed ? "–" : isNone ? "" : shareText(entry.share, largest < 0.1 ? 3 : 2);
  row.lastChild.title = isClosed ? "masked" : "";
}

// A line's width follows the share, the largest of this picture being 9 pixels.
const lineWidth = (part) => 0.5 + 8.5 * part;

function drawLines(focus, other, entries, largest) {
  const { svg } = lists, width = svg.parentElement.clientWidth;
  const heights = ["queries", "keys"].map((id) => byId(id).offsetTop + byId(id).offsetHeight);
  svg.setAttribute("width", width);
  svg.setAttribute("height", Math.max(...heights));
  const at = lists[focus.side].places.indexOf(focus.place), lines = [];
  for (const entry of at < 0 || !largest ? [] : entries) {
    const row = lists[other].rows[lists[other].places.indexOf(entry.place)];
    if (!row || !(entry.share > 0)) continue;
    const ends = [lists[focus.side].rows[at], row].map((end) => end.offsetTop + end.offsetHeight / 2);
    const [left, right] = focus.side === "query" ? ends : ends.reverse();
    lines.push(lineOf(`M0 ${left}C${width / 2} ${left} ${width / 2} ${right} ${width} ${right}`, entry.share / largest, isOfSink(focus, entry)));
  }
  svg.replaceChildren(...lines);
}

function lineOf(d, part, isSink) {
  if (isSink && choice.hideSinks) return makeSvg("path", { d, class: "of-sink taken", "stroke-width": 1 });
  const strength = Math.min(1, part), width = lineWidth(strength).toFixed(2);
  return makeSvg("path", { d, class: isSink ? "of-sink" : "", "stroke-width": width, "stroke-opacity": (0.3 + 0.6 * strength).toFixed(2) });
}

function tellTokens({ side, place }, open) {
  const parts = [...namedPlace(side, place), side === "query" ? ": what it gives to keys" : ": what queries give to it"];
  if (chosen.block > 1 && side === "query") {
    parts.push(`, its ${open.length} strongest, ${shareText(open.reduce((sum, entry) => sum + entry.share, 0))} together`);
  } else if (chosen.block > 1) parts.push(", by queries that have it among their strongest keys");
  if (chosen.isOfBlocks) parts.push(", in means of blocks");
  parts.push(". Widths follow attention weights, from the largest down.");
  if (choice.hideSinks) parts.push(" Lines to what is taken out are thin and broken; weights are of all attention.");
  byId("tokens-note").replaceChildren(...parts);
}

function pressOnToken(event, side) {
  const row = event.target.closest("[data-place]"), act = row && tokenKeys(event.key, side, row);
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
}

function tokenKeys(key, side, row) {
  const { rows, places } = lists[side], at = rows.indexOf(row);
  const press = () => keepToken(side, places[at]);
  return {
    ArrowUp: () => focusToken(side, at - 1),
    ArrowDown: () => focusToken(side, at + 1),
    Home: () => focusToken(side, 0),
    End: () => focusToken(side, rows.length - 1),
    ArrowRight: () => focusChosen("key"),
    ArrowLeft: () => focusChosen("query"),
    Enter: press,
    " ": press,
    Escape: () => row.blur(),
  }[key];
}

// At the end of a list that shows a part of the text, the part moves on.
async function focusToken(side, at) {
  const { rows, places } = lists[side];
  if (rows[at]) return rows[at].focus();
  const next = at < 0 ? places[0] - 1 : places[places.length - 1] + 1;
  if (next < 0 || next >= wordsOf(side).length) return;
  await choose({ [side]: next, side });
  pointed = null;
  drawTokens();
  lists[side].rows[lists[side].places.indexOf(next)]?.focus();
}

const focusChosen = (side) => lists[side].rows.find((row) => row.tabIndex === 0)?.focus();
