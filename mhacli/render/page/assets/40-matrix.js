// The chosen head as a picture: where its cells lie, and how they are drawn.

const matrix = { view: null, layout: null, canvas: null, overlay: null };
const LABELLED = 12, NUMBERED = 30, GRIDDED = 12, LARGEST_CELL = 76, STRIP_GAP = 6;
// A window may have no width for a moment, while it opens or is printed.
const NARROWEST = 240;
const SMALL = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";

const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The map in blocks large enough that a cell is at least a pixel, with and without its sinks.
const blocks = { index: -1, factor: 0, shown: null, rest: null, hasClosed: false, hasMissing: false };
function blocksOf(map, factor) {
  if (blocks.index !== map.index || blocks.factor !== factor) {
    const shown = pooled(map, factor);
    Object.assign(blocks, { index: map.index, factor, shown, rest: null });
    Object.assign(blocks, { hasClosed: shown.cells.includes(FORBIDDEN), hasMissing: shown.cells.some(Number.isNaN) });
  }
  if (choice.hideSinks && blocks.rest === null) blocks.rest = withoutSinks(blocks.shown);
  const drawn = choice.hideSinks ? blocks.rest : blocks.shown;
  drawn.most ??= drawn.cells.reduce((most, share) => (share > most ? share : most), 0);
  return { shown: blocks.shown, drawn };
}

// The top of the scale: common to all heads, but blocks hold more than cells.
function scaleTop(drawn) {
  const { largest, largest_without_sinks: rest } = RECORD.scale;
  const common = choice.hideSinks ? rest ?? 1 : largest;
  return (drawn.block === chosen.map.block ? common : Math.max(common, largestOf(drawn))) || 1;
}

// What no key of the plot gets of a row stands beside it: what sinks had that were taken out, and what a sink logit takes.
function stripNames(map) {
  return [...(choice.hideSinks && map.sinks.length ? ["sinks"] : []), ...(map.learned ? ["learned"] : [])];
}

const stripShares = ({ shown, drawn }, name) => (name === "sinks" ? drawn.taken : shown.learned);

function stripsFrom(pen, left) {
  let x = left;
  return stripNames(chosen.map).map((name) => {
    const strip = { name, title: name, x, width: Math.ceil(pen.measureText(name).width) + 4 };
    x += strip.width + STRIP_GAP;
    return strip;
  });
}

function cellLabel(map, side, cell) {
  const { from, to } = placesOf(map, side, cell);
  return from > to ? "‹pad›" : from === to && map.block === 1 ? wordsOf(side)[from] : rangeText(from, to);
}

function cut(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  const letters = [...text];
  while (letters.length && pen.measureText(letters.join("") + "…").width > width) letters.pop();
  return letters.join("") + "…";
}

function widestLabel(pen, map, side, limit) {
  let widest = 0;
  const count = side === "query" ? map.rows : map.columns;
  for (let cell = 0; cell < count && widest < limit; cell++) {
    widest = Math.max(widest, pen.measureText(cellLabel(map, side, cell).slice(0, 40)).width);
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

function marginsFor(pen, map, width, cells) {
  if (cells && (cells.wide < LABELLED || cells.high < LABELLED)) {
    return { left: 12 + Math.min(84, width / 6), top: 25 };
  }
  const column = widestLabel(pen, map, "key", 104), isFlat = cells && column + 6 <= cells.wide;
  const number = pen.measureText(`${wordsOf("query").length} `).width; // on the plate of the chosen row
  return { left: 12 + number + widestLabel(pen, map, "query", Math.min(132, width / 4)), top: isFlat ? 25 : column + 12, isFlat };
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
  let margins = marginsFor(pen, map, width);
  const fit = () => fittingCells(map, width - margins.left - reserved - 2, height - margins.top - 2);
  let cells = fit();
  margins = marginsFor(pen, map, width, cells);
  cells = fit();
  if (matrix.view) {
    const zoom = matrix.view.zoom;
    cells = { wide: cells.wide * zoom, high: cells.high * zoom };
    margins = marginsFor(pen, map, width, cells);
  }
  const factor = Math.max(1, Math.ceil(0.999 / Math.min(cells.wide, cells.high)));
  const left = margins.left + reserved, { top } = margins;
  const size = { wide: cells.wide * factor, high: cells.high * factor };
  const rows = Math.ceil(map.rows / factor), columns = Math.ceil(map.columns / factor);
  const plot = { width: Math.min(width - left - 1, columns * size.wide), height: Math.min(height - top - 1, rows * size.high) };
  const layout = { left, top, margins, strips: stripsFrom(pen, margins.left), factor, ...size, rows, columns, plot };
  layout.width = Math.min(width, Math.ceil(left + plot.width) + 3);
  layout.height = Math.ceil(top + plot.height + 4); // the plate of the last row hangs over
  layout.x = clampedStart(matrix.view ? matrix.view.x / factor : 0, columns, plot.width / size.wide);
  layout.y = clampedStart(matrix.view ? matrix.view.y / factor : 0, rows, plot.height / size.high);
  return layout;
}

const clampedStart = (start, count, room) => Math.max(0, Math.min(start, count - room));

// The cells that are in sight.
function inSight(layout) {
  const row = Math.floor(layout.y), column = Math.floor(layout.x);
  return {
    row, column,
    rows: Math.min(layout.rows, Math.ceil(layout.y + layout.plot.height / layout.high - 1e-6)) - row,
    columns: Math.min(layout.columns, Math.ceil(layout.x + layout.plot.width / layout.wide - 1e-6)) - column,
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
  Object.assign(layout, blocksOf(chosen.map, layout.factor));
  layout.scaleTop = scaleTop(layout.drawn);
  layout.level = leveller(choice.scale, layout.scaleTop);
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
  pen.fillStyle = hatching(pen);
  pen.fillRect(left, top, plot.width, plot.height);
  const canvas = make("canvas", { width: sight.columns, height: sight.rows });
  canvas.getContext("2d").putImageData(imageOf(layout.drawn, layout.level, sight), 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(canvas, xOf(layout, sight.column), yOf(layout, sight.row), sight.columns * wide, sight.rows * high);
  blankTakenCells(pen, layout, sight);
  if (wide < GRIDDED || high < GRIDDED) return;
  pen.fillStyle = themed("--card");
  for (let i = 0; i <= sight.columns; i++) pen.fillRect(xOf(layout, sight.column + i) - 1, top, 1, plot.height);
  for (let i = 0; i <= sight.rows; i++) pen.fillRect(left, yOf(layout, sight.row + i) - 1, plot.width, 1);
}

// A cell that was taken out is not one with a small weight: it has no colour of the scale, and a dash where numbers are.
const isTakenOut = (layout, column) =>
  choice.hideSinks && layout.drawn.block === 1 && hasSink(placesOf(layout.drawn, "key", column));

function blankTakenCells(pen, layout, sight) {
  const { drawn, wide, high } = layout;
  pen.fillStyle = themed("--card");
  for (let column = sight.column; column < sight.column + sight.columns; column++) {
    if (!isTakenOut(layout, column)) continue;
    for (let row = sight.row; row < sight.row + sight.rows; row++) {
      if (drawn.cells[row * drawn.columns + column] === FORBIDDEN) continue;
      pen.fillRect(xOf(layout, column), yOf(layout, row), wide, high);
    }
  }
}

// What may not be attended looks like no colour of the scale.
function hatching(pen) {
  const tile = make("canvas", { width: 6, height: 6 }), tilePen = tile.getContext("2d");
  tilePen.fillStyle = themed("--sunk");
  tilePen.fillRect(0, 0, 6, 6);
  tilePen.strokeStyle = themed("--hatch");
  tilePen.beginPath();
  for (const shift of [-6, 0, 6]) {
    tilePen.moveTo(shift - 1, 7);
    tilePen.lineTo(shift + 7, -1);
  }
  tilePen.stroke();
  return pen.createPattern(tile, "repeat");
}

function drawNumbers(pen, layout, sight) {
  const { drawn, level, wide, high } = layout, digits = wide >= 44 ? 3 : 2;
  pen.textAlign = "center";
  for (let row = sight.row; row < sight.row + sight.rows; row++) {
    for (let column = sight.column; column < sight.column + sight.columns; column++) {
      const share = drawn.cells[row * drawn.columns + column];
      if (share === FORBIDDEN) continue;
      const isMissing = Number.isNaN(share), isTaken = isTakenOut(layout, column);
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
  const hasLabels = layout.wide >= LABELLED && layout.high >= LABELLED;
  const { shown } = layout;
  layout.names = { query: [], key: [] };
  pen.fillStyle = themed("--muted");
  pen.textAlign = "right";
  const rowStep = hasLabels ? 1 : tickStep(layout.high / shown.block, 26) / shown.block;
  for (const row of ticks(shown, "query", sight.row, sight.rows, rowStep)) {
    const text = hasLabels ? cut(pen, cellLabel(shown, "query", row), layout.margins.left - 10) : tickOf(shown, "query", row);
    const x = layout.margins.left - 6, y = Math.max(layout.top + 5, yOf(layout, row + 0.5));
    pen.fillText(text, x, y);
    keepName(layout, "query", x - pen.measureText(text).width, x, y - 7, y + 7);
  }
  const columnStep = hasLabels ? 1 : tickStep(layout.wide / shown.block, 44) / shown.block;
  for (const column of ticks(shown, "key", sight.column, sight.columns, columnStep)) {
    drawColumnName(pen, layout, column, hasLabels);
  }
  if (hasSinks()) drawSinkMarks(pen, layout, sight);
}

// The cells of an axis that get a name: those that hold a place which the step divides.
function ticks(map, side, begin, count, step) {
  const places = Math.max(1, Math.round(step * map.block)), found = [];
  for (let cell = begin; cell < begin + count; cell++) {
    const { from, to } = placesOf(map, side, cell);
    if (step <= 1 || (from <= to && Math.ceil(from / places) * places <= to)) found.push(cell);
  }
  return found;
}

function tickOf(map, side, cell) {
  const { from, to } = placesOf(map, side, cell);
  return from > to ? "" : String(from);
}

function drawColumnName(pen, layout, column, hasLabels) {
  const x = xOf(layout, column + 0.5), { shown, top } = layout;
  if (!hasLabels || layout.margins.isFlat) {
    pen.textAlign = "center";
    const text = hasLabels ? cellLabel(shown, "key", column) : tickOf(shown, "key", column);
    const half = pen.measureText(text).width / 2, middle = Math.max(layout.left + half, x);
    pen.fillText(text, middle, top - 13);
    keepName(layout, "key", middle - half, middle + half, top - 20, top - 6);
    return;
  }
  pen.save();
  pen.translate(x, top - 6);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "left";
  const text = cut(pen, cellLabel(shown, "key", column), top - 10);
  pen.fillText(text, 0, 0);
  pen.restore();
  keepName(layout, "key", x - 7, x + 7, top - 6 - pen.measureText(text).width, top - 6);
}

// Where a name stands on an axis, so that what would be left of it beside a plate can be hidden.
function keepName(layout, side, left, right, top, bottom) {
  layout.names[side].push({ left: left - 1, right: right + 1, top, bottom });
}

// A triangle above each column of a sink.
function drawSinkMarks(pen, layout, sight) {
  pen.fillStyle = themed("--sink");
  for (const place of chosen.map.sinks) {
    const column = cellOf(layout.shown, "key", place), x = xOf(layout, column + 0.5);
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
  for (const { name, title, x, width } of layout.strips) {
    const shares = stripShares(layout, name);
    for (let row = sight.row; row < sight.row + sight.rows; row++) {
      const y = Math.max(layout.top, yOf(layout, row)), end = Math.min(layout.top + layout.plot.height, yOf(layout, row + 1));
      if (!layout.shown.seen[row]) continue;
      const colour = Number.isNaN(shares[row]) ? NO_NUMBER : sinkColour(shares[row]);
      pen.fillStyle = css(colour);
      pen.fillRect(x, y, width, end - y - (layout.high >= GRIDDED ? 1 : 0));
      if (layout.high < 16) continue;
      pen.fillStyle = inkOn(colour);
      pen.fillText(shareText(shares[row]), x + width / 2, (y + end) / 2);
    }
    pen.fillStyle = themed("--sink");
    pen.fillText(title, x + width / 2, layout.top - 13);
  }
}

// Where cells lie, for whoever reads the picture by a program.
function tellGeometry(layout) {
  const { left, top, wide, high, x, y, factor } = layout;
  Object.assign(matrix.canvas.dataset, { left, top, wide, high, column: x, row: y, factor, scaleTop: layout.scaleTop });
}
