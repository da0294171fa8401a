// The cell that is looked at: its outline, its names on the axes, and what is known of it in words.

// The cell under the pointer, or else the chosen one: {query, key} items, or a strip.
function cellInView() {
  if (pointed?.side === "cell") return pointed;
  if (pointed?.side === "query" || pointed?.side === "key") return null;
  const { shown } = matrix.layout;
  const row = cellOf(shown, "query", choice.query), column = cellOf(shown, "key", choice.key);
  return { row, column };
}

function drawCursor() {
  const { layout } = matrix, pen = penOf(matrix.overlay, layout.width, layout.height);
  const own = { row: cellOf(layout.shown, "query", choice.query), column: cellOf(layout.shown, "key", choice.key) };
  if (pointed === null || pointed.side === "cell") drawOutline(pen, layout, own, pointed === null);
  if (pointed?.side === "cell") drawOutline(pen, layout, pointed, true);
  if (pointed?.side === "query") drawBand(pen, layout, "query", pointed.query);
  if (pointed?.side === "key") drawBand(pen, layout, "key", pointed.key);
}

function clipToPlot(pen, layout) {
  pen.beginPath();
  pen.rect(layout.left - 2, layout.top - 2, layout.plot.width + 4, layout.plot.height + 4);
  pen.clip();
}

function drawOutline(pen, layout, { row, column, strip }, isNamed) {
  const y = yOf(layout, row), { high } = layout;
  const [x, wide] = strip === undefined ? [xOf(layout, column), layout.wide] : [strip.x, strip.width];
  pen.save();
  if (strip === undefined) clipToPlot(pen, layout);
  if (isNamed && strip === undefined) drawGuides(pen, layout, { x, y, wide, high });
  const gap = layout.wide >= GRIDDED ? 1 : 0, grown = gap ? 0 : 2; // a small cell is framed from outside
  const box = [x - grown, y - grown, wide - gap + 2 * grown, high - gap + 2 * grown];
  pen.lineWidth = isNamed ? 4 : 2.5;
  pen.strokeStyle = "#000";
  pen.strokeRect(...box);
  pen.lineWidth = isNamed ? 2 : 1.2;
  pen.strokeStyle = "#fff";
  pen.strokeRect(...box);
  pen.restore();
  if (!isNamed) return;
  drawName(pen, layout, "query", row);
  if (strip === undefined) drawName(pen, layout, "key", column);
}

// Lines along the row and the column, beside their cells and never on them: a colour says a share. Where cells are small,
// the names on the axes must do.
function drawGuides(pen, layout, { x, y, wide, high }) {
  if (wide >= 40 || wide < 5 || high < 5) return;
  const { left, top, plot } = layout;
  pen.strokeStyle = themed("--guide");
  pen.lineWidth = 1;
  pen.strokeRect(left - 1, y - 0.5, plot.width + 2, high + 1);
  pen.strokeRect(x - 0.5, top - 1, wide + 1, plot.height + 2);
}

// All cells of a query, or of a key.
function drawBand(pen, layout, side, item) {
  const cell = cellOf(layout.shown, side, item.from), last = cellOf(layout.shown, side, item.to);
  const { left, top, plot } = layout;
  pen.save();
  clipToPlot(pen, layout);
  const box =
    side === "query"
      ? [left, yOf(layout, cell) - 1.5, plot.width, (last - cell + 1) * layout.high + 3]
      : [xOf(layout, cell) - 1.5, top, (last - cell + 1) * layout.wide + 3, plot.height];
  for (const [width, colour] of [[3, "#000"], [1.5, "#fff"]]) {
    pen.lineWidth = width;
    pen.strokeStyle = colour;
    pen.strokeRect(...box);
  }
  pen.restore();
  drawName(pen, layout, side, cell);
}

// The name of a row or column on a plate, readable where other names have no room.
function drawName(pen, layout, side, cell) {
  const { from, to } = placesOf(layout.shown, side, cell);
  const own = layout.shown.block === 1 && from === to ? `${from} ${wordsOf(side)[from]}` : cellLabel(layout.shown, side, cell);
  const text = cut(pen, own, side === "query" ? Math.max(layout.margins.left - 10, 90) : 150);
  const width = pen.measureText(text).width + 10;
  const y = side === "query" ? yOf(layout, cell + 0.5) : layout.top - 13;
  const middle = side === "query" ? layout.margins.left - 2 - width / 2 : xOf(layout, cell + 0.5);
  const least = side === "key" && layout.strips.length ? layout.left - STRIP_GAP : 0;
  const x = Math.max(least, Math.min(layout.width - width, middle - width / 2));
  if (side === "query" && (y < layout.top || y > layout.top + layout.plot.height)) return;
  pen.fillStyle = themed("--card");
  for (const name of layout.names[side]) {
    const isTouched = name.left < x + width + 3 && name.right > x - 3 && name.top < y + 9 && name.bottom > y - 9;
    if (isTouched) pen.fillRect(name.left, name.top, name.right - name.left, name.bottom - name.top);
  }
  pen.fillStyle = themed("--ink");
  pen.beginPath();
  pen.roundRect(x, y - 9, width, 18, 4);
  pen.fill();
  pen.fillStyle = themed("--card");
  pen.textAlign = "center";
  pen.fillText(text, x + width / 2, y + 0.5);
}

// `query 5 “mat”`, or `queries 16–23`.
function named(side, item) {
  const words = wordsOf(side);
  if (item.from > item.to) return ["padding"];
  if (item.from !== item.to) return [`${side === "query" ? "queries" : "keys"} ${rangeText(item.from, item.to)}`];
  return [`${side} ${item.from} “`, tokenElement(words[item.from]), "”"];
}

// Two lines of a fixed height, so that the matrix stays where it is under the pointer.
function drawReadout() {
  const cell = cellInView();
  const [names, reading] = cell === null ? partsOfItem() : cell.strip === undefined ? partsOfCell(cell) : partsOfStrip(cell);
  byId("readout").replaceChildren(make("span", { class: "names" }, ...names), make("span", { class: "reading" }, ...reading));
  matrix.canvas.setAttribute("aria-label", matrixLabel());
}

function matrixLabel() {
  const { queries, keys } = chosen, sinks = choice.hideSinks && hasSinks() ? ", sinks taken out" : "";
  const shape = `${queries.length} queries as rows, ${keys.length} keys as columns`;
  return `${HEADS[choice.head].label}: ${shape}, ${choice.scale} scale${sinks}`;
}

function partsOfItem() {
  const { side } = pointed, item = pointed[side];
  const { entries, isPart } = side === "query" ? rowOf(item) : columnOf(item);
  const open = entries.filter((entry) => entry.share !== FORBIDDEN);
  const strongest = open.reduce((best, entry) => (entry.share > (best?.share ?? -1) ? entry : best), null);
  if (strongest === null) return [[...named(side, item), ": "], [side === "query" ? "sees no key" : "no query sees it"]];
  const given = isPart ? " is given most, of what is known, by " : " is given most by ";
  const [to, verb] = side === "query" ? ["key", " gives most to "] : ["query", given];
  const names = [...named(side, item), verb, ...named(to, strongest), ": "];
  return [names, [value(strongest.share, strongest.isExact), exactness(strongest)]];
}

function partsOfCell({ row, column }) {
  const { shown, drawn } = matrix.layout;
  const query = placesOf(shown, "query", row), key = placesOf(shown, "key", column), at = row * shown.columns + column;
  const names = [...named("query", query), " → ", ...named("key", key), ": "], reading = [];
  const share = shown.cells[at];
  const known = shown.block === 1 && query.from <= query.to && key.from <= key.to ? tokenShare(query.from, key.from) : null;
  if (share === FORBIDDEN) return [names, [make("strong", {}, "masked")]];
  if (known) reading.push(value(known.share, known.isExact), exactness(known));
  else {
    const mean = [value(share, shown.code === "f32", true), blockError(shown, row, column)];
    reading.push(...mean, " of a query’s attention, the mean of this block");
  }
  const isSink = hasSink(key), isTaken = isSink && shown.block === 1 && choice.hideSinks;
  const sinkText = ` · ${shown.block === 1 ? "" : "holds "}a sink${isTaken ? ", taken out" : ""}`;
  if (isSink) reading.push(make("span", { class: "sink" }, sinkText));
  if (choice.hideSinks && (hasSinks() || chosen.map.learned) && !isTaken && !Number.isNaN(share)) {
    const isNear = shown.code !== "f32";
    reading.push(` · ${isNear ? "≈ " : ""}${shareText(drawn.cells[at], 3)} of what is left beside sinks`);
  }
  return [names, reading];
}

// Known of the blocks that the page carries; of larger ones that the window makes of them only that they are near.
function blockError(shown, row, column) {
  const share = shown.cells[row * shown.columns + column], isCoded = shown.code !== "f32" && shown.block === chosen.map.block;
  return isCoded ? exactness({ share, isExact: false, error: codeError(shown, row, column) }) : "";
}

function partsOfStrip({ row, strip }) {
  const { layout } = matrix, shares = stripShares(layout, strip.name);
  const words = strip.name === "sinks" ? "sinks, taken out" : "the sink logit, which is no key";
  const names = [...named("query", placesOf(layout.shown, "query", row)), ` → ${words}: `];
  return [names, [value(shares[row], layout.shown.block === 1)]];
}

// A number as it stands in the record where it is known exactly; else in as many digits as say something.
function value(share, isExact, isMean = false) {
  if (Number.isNaN(share)) return make("strong", { class: "bad" }, "not a number");
  if (isExact && !isMean) return make("strong", {}, exactText(share));
  return make("strong", {}, (isExact ? "" : "≈ ") + shareText(share, digitsOf(share)));
}

const digitsOf = (share) => (share < 0.01 ? 5 : 3);

function exactness({ share, isExact, error }) {
  if (Number.isNaN(share)) return "";
  if (isExact) return RECORD.bits === 64 ? " rounded to 32 bits" : " exact";
  return error === undefined ? "" : ` ± ${boundText(error + 0.5 / 10 ** digitsOf(share))} (kept in 8 bits)`;
}

// One digit, rounded up: the number that is told is never further off, its own rounding included.
function boundText(error) {
  const digits = Math.max(0, -Math.floor(Math.log10(error)));
  return shareText(Math.ceil(error * 10 ** digits) / 10 ** digits, digits);
}
