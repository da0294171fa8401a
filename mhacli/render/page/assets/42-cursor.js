// The cell that is looked at: its outline, its names on the axes, and what is known of it in words.

// The cell under the pointer, or else the chosen one; null while the pointer is at a token.
function cellInView() {
  if (pointed?.side === "cell") return pointed;
  if (pointed) return null;
  return { row: cellOf("query", choice.query), column: cellOf("key", choice.key) };
}

function drawCursor() {
  const { layout } = matrix, pen = penOf(matrix.overlay, layout.width, layout.height);
  const own = { row: cellOf("query", choice.query), column: cellOf("key", choice.key) };
  if (pointed === null || pointed.side === "cell") drawOutline(pen, layout, own, pointed === null);
  if (pointed?.side === "cell") drawOutline(pen, layout, pointed, true);
  else if (pointed) drawBand(pen, layout, pointed.side, cellOf(pointed.side, pointed.place));
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
  const gap = layout.wide >= GRIDDED ? 1 : 0, grown = gap ? 0 : 2; // a small cell is framed from outside
  const box = [x - grown, y - grown, wide - gap + 2 * grown, high - gap + 2 * grown];
  strokeBox(pen, box, isNamed ? [4, 2] : [2.5, 1.2]);
  pen.restore();
  if (!isNamed) return;
  drawName(pen, layout, "query", row);
  if (strip === undefined) drawName(pen, layout, "key", column);
}

// A white frame within a black one, so that it stands out from every colour.
function strokeBox(pen, box, widths) {
  widths.forEach((width, i) => {
    pen.lineWidth = width;
    pen.strokeStyle = ["#000", "#fff"][i];
    pen.strokeRect(...box);
  });
}

// All cells of a query, or of a key.
function drawBand(pen, layout, side, cell) {
  const { left, top, plot } = layout;
  pen.save();
  clipToPlot(pen, layout);
  const box =
    side === "query"
      ? [left, yOf(layout, cell) - 1.5, plot.width, layout.high + 3]
      : [xOf(layout, cell) - 1.5, top, layout.wide + 3, plot.height];
  strokeBox(pen, box, [3, 1.5]);
  pen.restore();
  drawName(pen, layout, side, cell);
}

// The name of a row or column on a plate, readable where other names have no room.
function drawName(pen, layout, side, cell) {
  const own = chosen.map.block === 1 ? `${cell} ${wordsOf(side)[cell]}` : cellLabel(side, cell);
  const text = cut(pen, own, side === "query" ? Math.max(layout.margins.left - 10, 90) : 150);
  const width = pen.measureText(text).width + 10;
  const y = side === "query" ? yOf(layout, cell + 0.5) : layout.top - 13;
  const middle = side === "query" ? layout.margins.left - 2 - width / 2 : xOf(layout, cell + 0.5);
  const least = side === "key" && layout.strips.length ? layout.left - STRIP_GAP : 0;
  const x = Math.max(least, Math.min(layout.width - width, middle - width / 2));
  if (side === "query" && (y < layout.top || y > layout.top + layout.plot.height)) return;
  pen.strokeStyle = themed("--card");
  pen.fillStyle = themed("--ink");
  pen.lineWidth = 6;
  pen.beginPath();
  pen.roundRect(x, y - 9, width, 18, 4);
  pen.stroke();
  pen.fill();
  pen.fillStyle = themed("--card");
  pen.textAlign = "center";
  pen.fillText(text, x + width / 2, y + 0.5);
}

// `query 5 “mat”`, or `queries 16–23`.
function named(side, { from, to }) {
  const words = wordsOf(side);
  if (chosen.isOfBlocks || from !== to) {
    return [`${side === "query" ? "queries" : "keys"} ${chosen.isOfBlocks ? words[from] : rangeText(from, to)}`];
  }
  return [`${side} ${from} “`, tokenElement(words[from]), "”"];
}

const namedPlace = (side, place) => named(side, { from: place, to: place });

// Two lines of a fixed height, so that the matrix stays where it is under the pointer.
function drawReadout() {
  const cell = cellInView();
  const [names, reading] = cell === null ? partsOfPlace() : cell.strip === undefined ? partsOfCell(cell) : partsOfStrip(cell);
  byId("readout").replaceChildren(make("span", { class: "names" }, ...names), make("span", { class: "reading" }, ...reading));
  matrix.canvas.setAttribute("aria-label", matrixLabel());
}

function matrixLabel() {
  const sinks = choice.hideSinks && hasSinks() ? ", sinks taken out" : "";
  const shape = `${chosen.map.rows} rows of queries, ${chosen.map.columns} columns of keys`;
  return `${HEADS[choice.head].label}: ${shape}, ${choice.scale} scale${sinks}`;
}

function partsOfPlace() {
  const { side, place } = pointed, entries = side === "query" ? rowOf(place) : columnOf(place);
  const strongest = entries.reduce((best, entry) => (entry.share > (best?.share ?? FORBIDDEN) ? entry : best), null);
  if (strongest === null) return [[...namedPlace(side, place), ": "], [side === "query" ? "sees no key" : "no query is known to see it"]];
  const given = chosen.block > 1 ? " is given most, of what is known, by " : " is given most by ";
  const [to, verb] = side === "query" ? ["key", " gives most to "] : ["query", given];
  return [[...namedPlace(side, place), verb, ...namedPlace(to, strongest.place), ": "], valueParts(strongest.share, chosen.isOfBlocks)];
}

function partsOfCell({ row, column }) {
  const { map } = chosen, query = placesOf("query", row), key = placesOf("key", column), at = row * map.columns + column;
  const names = [...named("query", query), " → ", ...named("key", key), ": "], isBlock = map.block > 1;
  const share = map.cells[at];
  if (share === FORBIDDEN) return [names, [make("strong", {}, "masked")]];
  const reading = valueParts(share, isBlock);
  if (isBlock) reading.push(" of a query’s attention, the mean of this block", ...strongestWithin(query, key));
  const isSink = hasSink(key), isTaken = isSink && !isBlock && choice.hideSinks;
  const sinkText = ` · ${isBlock ? "holds " : ""}a sink${isTaken ? ", taken out" : ""}`;
  if (isSink) reading.push(make("span", { class: "sink" }, sinkText));
  if (choice.hideSinks && (hasSinks() || map.learned) && !isTaken && !Number.isNaN(share)) {
    reading.push(` · ${shareText(matrix.layout.cells[at], 3)} of what is left beside sinks`);
  }
  return [names, reading];
}

// The largest weight of a block that the page has.
function strongestWithin(queries, keys) {
  let best = null;
  for (let query = queries.from; query <= queries.to; query++) {
    for (const [key, share] of strongestOf(query)) {
      const isWithin = key >= keys.from && key <= keys.to;
      if (isWithin && share > (best?.share ?? 0)) best = { query, key, share };
    }
  }
  if (best === null) return [];
  return [" · most: ", ...namedPlace("query", best.query), " → ", ...namedPlace("key", best.key), " ", ...valueParts(best.share)];
}

function partsOfStrip({ row, strip }) {
  const words = strip.name === "sinks" ? "sinks, taken out" : "the sink logit, which is no key";
  const names = [...named("query", placesOf("query", row)), ` → ${words}: `];
  return [names, valueParts(strip.shares[row], chosen.map.block > 1)];
}

// A weight as it stands in the record; a mean in as many digits as say something.
function valueParts(share, isMean = false) {
  if (Number.isNaN(share)) return [make("strong", { class: "bad" }, "not a number")];
  if (isMean) return [make("strong", {}, shareText(share, share < 0.01 ? 5 : 3))];
  return [make("strong", {}, exactText(share)), RECORD.bits === 64 ? " rounded to 32 bits" : " exact"];
}
