// The chosen head as a picture: where its cells lie, and how they are drawn.

const matrix = { view: null, layout: null, canvas: null, overlay: null };
const LABELLED = 12, NUMBERED = 30, GRIDDED = 12, LARGEST_CELL = 76, STRIP_GAP = 6;
// A window may have no width for a moment, while it opens or is printed.
const NARROWEST = 240;
const SMALL = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";

const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What no key of the plot gets of a row stands beside it: what sinks had that were taken out, and what a sink logit takes.
function stripsFrom(pen, left) {
  const { map } = chosen, strips = [];
  if (choice.hideSinks && hasSinks()) strips.push({ name: "sinks", shares: map.taken });
  if (map.learned) strips.push({ name: "learned", shares: map.learned });
  let x = left;
  return strips.map((strip) => {
    const width = Math.ceil(pen.measureText(strip.name).width) + 4, from = x;
    x += width + STRIP_GAP;
    return { ...strip, x: from, width };
  });
}

function cellLabel(side, cell) {
  const { from, to } = placesOf(side, cell);
  return chosen.block === 1 ? wordsOf(side)[from] : rangeText(from, to);
}

function cut(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  const letters = [...text];
  while (letters.length && pen.measureText(letters.join("") + "…").width > width) letters.pop();
  return letters.join("") + "…";
}

function widestLabel(pen, side, limit) {
  let widest = 0;
  for (let cell = 0; cell < sizeOf(side) && widest < limit; cell++) {
    widest = Math.max(widest, pen.measureText(cellLabel(side, cell).slice(0, 40)).width);
  }
  return Math.ceil(Math.min(widest, limit));
}

// Cells as large as fit; square, unless one side is much longer than the other.
function fittingCells(map, width, height) {
  const wide = Math.min(LARGEST_CELL, width / map.columns), high = Math.min(LARGEST_CELL, height / map.rows);
  const least = Math.min(wide, high), ratio = Math.max(map.rows / map.columns, map.columns / map.rows);
  const most = ratio > 3 ? Math.max(least, Math.min(24, least * ratio)) : least;
  const whole = (size) => (size >= 4 ? Math.floor(size) : size);
  return { wide: whole(Math.min(wide, most)), high: whole(Math.min(high, most)) };
}

function marginsFor(pen, width, cells) {
  if (cells && (cells.wide < LABELLED || cells.high < LABELLED)) {
    return { left: 12 + Math.min(84, width / 6), top: 25 };
  }
  const column = widestLabel(pen, "key", 104), isFlat = cells && column + 6 <= cells.wide;
  const number = pen.measureText(`${wordsOf("query").length} `).width; // on the plate of the chosen row
  return { left: 12 + number + widestLabel(pen, "query", Math.min(132, width / 4)), top: isFlat ? 25 : column + 12, isFlat };
}

// As high as the first screen leaves room, where the plot begins there.
function roomBelow() {
  const begin = byId("matrix-area").getBoundingClientRect().top + window.scrollY, screen = window.innerHeight;
  return Math.max(360, Math.min(760, screen - (begin < screen / 2 ? begin + 76 : 190)));
}

function layoutMatrix(pen) {
  const { map } = chosen, width = Math.max(NARROWEST, byId("matrix-area").clientWidth);
  const height = roomBelow();
  const reserved = stripsFrom(pen, 0).reduce((sum, strip) => sum + strip.width + STRIP_GAP, 0);
  let margins = marginsFor(pen, width);
  const fit = () => fittingCells(map, width - margins.left - reserved - 2, height - margins.top - 2);
  let cells = fit();
  margins = marginsFor(pen, width, cells);
  cells = fit();
  if (matrix.view) {
    const zoom = matrix.view.zoom;
    cells = { wide: cells.wide * zoom, high: cells.high * zoom };
    margins = marginsFor(pen, width, cells);
  }
  const left = margins.left + reserved, { top } = margins, { wide, high } = cells;
  const plot = { width: Math.min(width - left - 1, map.columns * wide), height: Math.min(height - top - 1, map.rows * high) };
  const x = clampedStart(matrix.view?.x ?? 0, map.columns, plot.width / wide);
  const y = clampedStart(matrix.view?.y ?? 0, map.rows, plot.height / high);
  if (matrix.view) Object.assign(matrix.view, { x, y }); // a view never runs ahead of what is seen
  return {
    left, top, margins, x, y, strips: stripsFrom(pen, margins.left), wide, high, plot,
    width: Math.min(width, Math.ceil(left + plot.width) + 3),
    height: Math.ceil(top + plot.height + 4), // the plate of the last row hangs over
  };
}

const clampedStart = (start, count, room) => Math.max(0, Math.min(start, count - room));

// The cells that are in sight.
function inSight(layout) {
  const row = Math.floor(layout.y), column = Math.floor(layout.x);
  return {
    row, column,
    rows: Math.min(chosen.map.rows, Math.ceil(layout.y + layout.plot.height / layout.high - 1e-6)) - row,
    columns: Math.min(chosen.map.columns, Math.ceil(layout.x + layout.plot.width / layout.wide - 1e-6)) - column,
  };
}

const xOf = (layout, column) => layout.left + (column - layout.x) * layout.wide;
const yOf = (layout, row) => layout.top + (row - layout.y) * layout.high;

function penOf(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = SMALL;
  pen.textBaseline = "middle";
  return pen;
}

function drawMatrix() {
  const measure = matrix.canvas.getContext("2d");
  measure.font = SMALL;
  const layout = (matrix.layout = layoutMatrix(measure));
  layout.cells = cellsOf(chosen.map);
  const pen = penOf(matrix.canvas, layout.width, layout.height), sight = inSight(layout);
  pen.save();
  pen.beginPath();
  pen.rect(layout.left, layout.top, layout.plot.width, layout.plot.height);
  pen.clip();
  drawCells(pen, layout, sight);
  if (layout.wide >= NUMBERED && layout.high >= 16) drawNumbers(pen, layout, sight);
  pen.restore();
  drawAxes(pen, layout, sight);
  drawStrips(pen, layout, sight);
  tellGeometry(layout);
}

function drawCells(pen, layout, sight) {
  const { left, top, plot, wide, high } = layout;
  pen.fillStyle = themed("--masked");
  pen.fillRect(left, top, plot.width, plot.height);
  const { map } = chosen;
  pen.imageSmoothingEnabled = wide < 1 || high < 1;
  pen.drawImage(imageOf(map, layout.cells), xOf(layout, 0), yOf(layout, 0), map.columns * wide, map.rows * high);
  blankTakenCells(pen, layout, sight);
  if (wide < GRIDDED || high < GRIDDED) return;
  pen.fillStyle = themed("--card");
  for (let i = 0; i <= sight.columns; i++) pen.fillRect(xOf(layout, sight.column + i) - 1, top, 1, plot.height);
  for (let i = 0; i <= sight.rows; i++) pen.fillRect(left, yOf(layout, sight.row + i) - 1, plot.width, 1);
}

// A cell that was taken out is not one with a small weight: it has no colour of the scale, and a dash where numbers are.
const isTakenOut = (column) => choice.hideSinks && chosen.map.block === 1 && hasSink(placesOf("key", column));

function blankTakenCells(pen, layout, sight) {
  const { cells, wide, high } = layout;
  pen.fillStyle = themed("--card");
  for (let column = sight.column; column < sight.column + sight.columns; column++) {
    if (!isTakenOut(column)) continue;
    for (let row = sight.row; row < sight.row + sight.rows; row++) {
      if (cells[row * chosen.map.columns + column] === FORBIDDEN) continue;
      pen.fillRect(xOf(layout, column), yOf(layout, row), wide, high);
    }
  }
}

function drawNumbers(pen, layout, sight) {
  const { cells, wide } = layout, digits = wide >= 44 ? 3 : 2, level = leveller();
  pen.textAlign = "center";
  for (let row = sight.row; row < sight.row + sight.rows; row++) {
    for (let column = sight.column; column < sight.column + sight.columns; column++) {
      const share = cells[row * chosen.map.columns + column];
      if (share === FORBIDDEN) continue;
      const isMissing = Number.isNaN(share), isTaken = isTakenOut(column);
      pen.fillStyle = isTaken ? themed("--muted") : inkOn(isMissing ? NO_NUMBER : COLOURS[level(share)]);
      const text = isTaken ? "–" : isMissing ? "?" : shareText(share, digits);
      pen.fillText(text, xOf(layout, column + 0.5), yOf(layout, row + 0.5), wide - 2);
    }
  }
}

// Every so many cells get a number where there is no room for tokens.
function tickStep(size, room) {
  for (let step = 1; ; step *= 10) for (const part of [1, 2, 5]) if (step * part * size >= room) return step * part;
}

function drawAxes(pen, layout, sight) {
  const hasLabels = layout.wide >= LABELLED && layout.high >= LABELLED, x = layout.margins.left - 6;
  const steps = hasLabels ? [1, 1] : [tickStep(layout.high, 26), tickStep(layout.wide, 44)];
  pen.fillStyle = themed("--muted");
  pen.textAlign = "right";
  for (let row = sight.row; row < sight.row + sight.rows; row++) {
    if (row % steps[0]) continue;
    const text = hasLabels ? cut(pen, cellLabel("query", row), layout.margins.left - 10) : tickOf("query", row);
    pen.fillText(text, x, Math.max(layout.top + 5, yOf(layout, row + 0.5)));
  }
  for (let column = sight.column; column < sight.column + sight.columns; column++) {
    if (column % steps[1] === 0) drawColumnName(pen, layout, column, hasLabels);
  }
  if (hasSinks()) drawSinkMarks(pen, layout, sight);
}

// The place in the text where a row or column begins.
const tickOf = (side, cell) => String(Math.max(0, cell * chosen.map.block + chosen.map.first[side === "query" ? 0 : 1]));

function drawColumnName(pen, layout, column, hasLabels) {
  const x = xOf(layout, column + 0.5), { top } = layout;
  if (!hasLabels || layout.margins.isFlat) {
    pen.textAlign = "center";
    const text = hasLabels ? cellLabel("key", column) : tickOf("key", column);
    pen.fillText(text, Math.max(layout.left + pen.measureText(text).width / 2, x), top - 13);
    return;
  }
  pen.save();
  pen.translate(x, top - 6);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "left";
  pen.fillText(cut(pen, cellLabel("key", column), top - 10), 0, 0);
  pen.restore();
}

// A triangle above each column of a sink.
function drawSinkMarks(pen, layout, sight) {
  pen.fillStyle = themed("--sink");
  for (const place of chosen.sinks) {
    const column = cellOf("key", place), x = xOf(layout, column + 0.5);
    if (column < sight.column || column >= sight.column + sight.columns) continue;
    pen.beginPath();
    pen.moveTo(x - 4, layout.top - 6);
    pen.lineTo(x + 4, layout.top - 6);
    pen.lineTo(x, layout.top - 1);
    pen.fill();
  }
}

function drawStrips(pen, layout, sight) {
  pen.textAlign = "center";
  for (const { name, shares, x, width } of layout.strips) {
    for (let row = sight.row; row < sight.row + sight.rows; row++) {
      const y = Math.max(layout.top, yOf(layout, row)), end = Math.min(layout.top + layout.plot.height, yOf(layout, row + 1));
      if (shares[row] === FORBIDDEN) continue;
      const colour = Number.isNaN(shares[row]) ? NO_NUMBER : sinkColour(shares[row]);
      pen.fillStyle = css(colour);
      pen.fillRect(x, y, width, end - y - (layout.high >= GRIDDED ? 1 : 0));
      if (layout.high < 16) continue;
      pen.fillStyle = inkOn(colour);
      pen.fillText(shareText(shares[row]), x + width / 2, (y + end) / 2);
    }
    pen.fillStyle = themed("--sink");
    pen.fillText(name, x + width / 2, layout.top - 13);
  }
}

// Where cells lie, for whoever reads the picture by a program.
function tellGeometry(layout) {
  const { left, top, wide, high, x, y } = layout;
  Object.assign(matrix.canvas.dataset, { left, top, wide, high, column: x, row: y });
}
