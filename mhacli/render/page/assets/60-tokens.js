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
    return make("div", { class: "column" }, make("h3", {}, title), makeSlider(side), list);
  };
  lists.svg = makeSvg("svg", { class: "lines", "aria-hidden": "true" });
  const between = make("div", { class: "between" }, lists.svg);
  const columns = make("div", { class: "columns" }, column("query", "queries"), between, column("key", "keys"));
  byId("tokens-area").append(columns, make("p", { id: "tokens-note", class: "note" }));
}

function makeSlider(side) {
  const slider = make("input", { type: "range", id: `${side}-range`, min: 0, "aria-label": `${side} in the text` });
  slider.addEventListener("input", () => choose({ [side]: Number(slider.value), side }));
  return slider;
}

// The query or key whose lines are drawn, and whether its list must stay as it is under the pointer.
function focusOfTokens() {
  if (pointed?.side === "query" || pointed?.side === "key") {
    return { side: pointed.side, item: pointed[pointed.side], stays: true };
  }
  if (pointed?.side === "cell" && pointed.query.from <= pointed.query.to) {
    return { side: "query", item: itemAt("query", pointed.query.from), stays: false };
  }
  return { side: choice.side, item: itemAt(choice.side, choice[choice.side]), stays: false };
}

// The smallest listed part that holds a place.
function itemAt(side, place) {
  const holding = chosen.items[side].filter((item) => item.from <= place && place <= item.to);
  return holding.reduce((best, item) => (item.to - item.from < best.to - best.from ? item : best));
}

function drawTokens() {
  const focus = focusOfTokens(), other = focus.side === "query" ? "key" : "query";
  const found = focus.side === "query" ? rowOf(focus.item) : columnOf(focus.item);
  const open = found.entries.filter((entry) => entry.share !== FORBIDDEN);
  const drawn = choice.hideSinks ? open.filter((entry) => !isOfSink(focus, entry)) : open;
  const largest = drawn.reduce((most, entry) => Math.max(most, entry.share || 0), 0);
  if (!focus.stays) fillList(focus.side, listedAround(focus.side, focus.item));
  fillList(other, listedBeside(other, found.entries, focus.item));
  markFocus(focus);
  markShares(other, focus, found.entries, largest);
  drawSliders();
  drawLines(focus, other, largest);
  tellTokens(focus, found, open);
}

const isOfSink = (focus, entry) => hasSink(focus.side === "query" ? entry : focus.item);

function listedAround(side, item) {
  const all = chosen.items[side];
  if (all.length <= MOST_LISTED) return all;
  const at = all.findIndex((one) => isSame(one, item));
  const begin = Math.max(0, Math.min(all.length - LISTED, at - (LISTED >> 1)));
  return all.slice(begin, begin + LISTED);
}

// The strongest of them and the nearest, in the order of the text.
function listedBeside(side, entries, near) {
  const all = chosen.items[side];
  if (all.length <= MOST_LISTED && entries.length >= all.length) return entries;
  const strongest = entries.filter((entry) => entry.share > 0).sort((a, b) => b.share - a.share).slice(0, LISTED - 6);
  const chosenItems = [...strongest], at = all.findIndex((one) => one.to >= near.from);
  for (let step = 0; chosenItems.length < LISTED && step < all.length; step++) {
    const item = all[(at < 0 ? all.length - 1 : at) + (step % 2 ? -(step + 1) / 2 : step / 2)];
    if (item && !chosenItems.some((one) => one.from <= item.to && item.from <= one.to)) chosenItems.push(item);
  }
  return chosenItems.sort((a, b) => a.from - b.from || a.to - b.to);
}

const nameOf = (item) => `${item.from}-${item.to}`;

// New elements only where other parts are listed: the one that has the focus must not vanish.
function fillList(side, items) {
  const element = byId(side === "query" ? "queries" : "keys"), names = items.map(nameOf).join();
  const isSameText = lists[side].words === wordsOf(side) && lists[side].names === names;
  if (isSameText) return;
  const rows = [];
  items.forEach((item, i) => {
    if (i && item.from > items[i - 1].to + 1) rows.push(make("li", { class: "gap", role: "presentation" }, "⋯"));
    rows.push(makeToken(side, item));
  });
  element.replaceChildren(...rows);
  lists[side] = { names, words: wordsOf(side), items, rows: rows.filter((row) => row.dataset.place) };
}

function makeToken(side, item) {
  const words = wordsOf(side).slice(item.from, Math.min(item.to + 1, item.from + 24));
  const token = make("li", { role: "option", tabindex: -1, "data-place": item.from, "data-to": item.to, title: words.join(" ") });
  const spaced = words.flatMap((word, i) => (i ? [" ", tokenElement(word)] : [tokenElement(word)]));
  token.append(
    make("span", { class: "place" }, rangeText(item.from, item.to)),
    make("span", { class: "words" }, ...spaced),
    make("span", { class: "share" }),
  );
  token.addEventListener("pointerenter", () => point({ side, [side]: item }));
  token.addEventListener("focus", () => point({ side, [side]: item }));
  token.addEventListener("click", () => pinToken(side, item));
  return token;
}

function pinToken(side, item) {
  if (String(getSelection())) return; // somebody copies text
  keepToken(side, item);
}

const keepToken = (side, item) =>
  choose({ [side]: item.from, side, ...(side === "query" ? { key: strongestKey(item.from) } : {}) });

function markFocus(focus) {
  for (const side of ["query", "key"]) {
    const current = focus.side === side ? focus.item : null, own = itemAt(side, choice[side]);
    let reachable = -1;
    lists[side].items.forEach((item, i) => {
      const row = lists[side].rows[i], isOwn = isSame(item, own);
      row.classList.toggle("current", current !== null && isSame(item, current));
      row.classList.toggle("of-sink", side === "key" && hasSink(item));
      row.setAttribute("aria-selected", isOwn && side === choice.side);
      row.tabIndex = -1;
      if (isOwn || reachable < 0) reachable = i;
      if (side === focus.side) markShare(row, null);
    });
    if (reachable >= 0) lists[side].rows[reachable].tabIndex = 0;
  }
}

function markShares(side, focus, entries, largest) {
  const known = new Map(entries.map((entry) => [nameOf(entry), entry]));
  lists[side].items.forEach((item, i) => {
    const entry = known.get(nameOf(item));
    markShare(lists[side].rows[i], entry ?? null, largest, entry && isOfSink(focus, entry));
  });
}

function markShare(row, entry, largest = 1, isSink = false) {
  const isClosed = entry?.share === FORBIDDEN, isNone = entry === null || isClosed;
  const length = isNone || !(entry.share > 0) || (isSink && choice.hideSinks) ? 0 : Math.min(1, entry.share / largest);
  row.style.setProperty("--part", `${(100 * length).toFixed(1)}%`);
  row.classList.toggle("closed", isClosed);
  const known = isNone ? "" : shareText(entry.share, largest < 0.1 ? 3 : 2);
  row.lastChild.textContent = isClosed ? "–" : known;
  if (isClosed) row.lastChild.title = "masked";
  else row.lastChild.removeAttribute("title");
}

// A line's width follows the share, the largest of this picture being 9 pixels.
const lineWidth = (share, largest) => 0.5 + (8.5 * share) / largest;

function drawLines(focus, other, largest) {
  const { svg } = lists, width = svg.parentElement.clientWidth;
  const middle = (row) => row.offsetTop + row.offsetHeight / 2;
  const heights = ["queries", "keys"].map((id) => byId(id).offsetTop + byId(id).offsetHeight);
  svg.setAttribute("width", width);
  svg.setAttribute("height", Math.max(...heights));
  const at = lists[focus.side].items.findIndex((item) => isSame(item, focus.item));
  const lines = at < 0 || !largest ? [] : linesFrom(middle(lists[focus.side].rows[at]), focus, other, { largest, width, middle });
  svg.replaceChildren(...lines);
}

function linesFrom(begin, focus, other, { largest, width, middle }) {
  const shares = new Map((focus.side === "query" ? rowOf(focus.item) : columnOf(focus.item)).entries.map((e) => [nameOf(e), e]));
  const lines = [];
  lists[other].items.forEach((item, i) => {
    const entry = shares.get(nameOf(item));
    if (!entry || !(entry.share > 0)) return;
    const isSink = isOfSink(focus, entry), isTaken = isSink && choice.hideSinks, part = Math.min(1, entry.share / largest);
    const [left, right] = focus.side === "query" ? [begin, middle(lists[other].rows[i])] : [middle(lists[other].rows[i]), begin];
    lines.push(makeSvg("path", {
      d: `M0 ${left}C${width / 2} ${left} ${width / 2} ${right} ${width} ${right}`,
      class: isSink ? (isTaken ? "of-sink taken" : "of-sink") : "",
      "data-place": item.from, "data-share": entry.share,
      "stroke-width": isTaken ? 1 : lineWidth(part, 1).toFixed(2), "stroke-opacity": isTaken ? 1 : (0.3 + 0.6 * part).toFixed(2),
    }));
  });
  return lines;
}

function drawSliders() {
  for (const side of ["query", "key"]) {
    const slider = byId(`${side}-range`);
    slider.hidden = chosen.items[side].length <= MOST_LISTED;
    slider.max = wordsOf(side).length - 1;
    slider.value = choice[side];
    slider.setAttribute("aria-valuetext", `${side} ${choice[side]} ${wordsOf(side)[choice[side]]}`);
  }
}

function tellTokens(focus, found, open) {
  const isQuery = focus.side === "query", isOne = focus.item.from === focus.item.to;
  const who = isQuery ? `what ${isOne ? "it gives" : "they give"} to keys` : `what queries give to ${isOne ? "it" : "them"}`;
  const parts = [...named(focus.side, focus.item), `: ${who}`];
  if (found.isPart && isQuery) {
    parts.push(`, its ${open.length} strongest, ${shareText(open.reduce((sum, entry) => sum + entry.share, 0))} together`);
  } else if (found.isPart) parts.push(", by queries that have it among their strongest keys");
  if (found.isBlock) parts.push(", in means of blocks");
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
  const { rows, items } = lists[side], at = rows.indexOf(row);
  const press = () => keepToken(side, items[at]);
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
  const { rows, items } = lists[side];
  if (rows[at]) return rows[at].focus();
  const all = chosen.items[side], edge = all.findIndex((one) => isSame(one, items[at < 0 ? 0 : items.length - 1]));
  const next = all[edge + (at < 0 ? -1 : 1)];
  if (!next) return;
  await choose({ [side]: next.from, side });
  pointed = null;
  drawTokens();
  lists[side].rows[lists[side].items.findIndex((one) => isSame(one, next))]?.focus();
}

const focusChosen = (side) => lists[side].rows.find((row) => row.tabIndex === 0)?.focus();
