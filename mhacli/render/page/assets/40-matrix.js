// The chosen head as a picture that scrolls under the names of its rows and columns. Places are
// numbers of cells, which the style sheet turns into pixels.

const NAMED = 12, NUMBERED = 30, MAX_CELL = 76, LETTER = 7, STRIP = 44, SPARE = 3;
let layout = {};

// Beside the plot: of each row what sinks had that were taken out, and what a sink logit takes.
function strips() {
  const { taken, learned, about } = chosen.map, found = [];
  if (choice.hideSinks && about && chosen.sinks.length) found.push(["sinks", taken]);
  if (learned) found.push(["learned", learned]);
  return found;
}

function cellName(side, cell) {
  const [from, to] = placesOf(side, cell);
  return chosen.perCell > 1 ? rangeText(from, to) : wordsOf(side)[cell];
}

// Cells as large as fit; square, unless one side is much longer than the other.
function fittingCells({ rows, columns }, width, height) {
  const wide = Math.min(MAX_CELL, width / columns), high = Math.min(MAX_CELL, height / rows);
  const least = Math.min(wide, high), isLong = Math.max(rows / columns, columns / rows) > 3;
  const sizes = [wide, high].map((size) => (isLong ? Math.min(size, Math.max(least, 24)) : least));
  return sizes.map((size) => (size >= 4 ? Math.floor(size) : size));
}

// Names stand beside cells that are large enough for them, else numbers at every so many cells.
function layOut() {
  const { map } = chosen, area = byId("matrix").clientWidth;
  const height = between(340, 720, innerHeight - 330), reserved = strips().length * STRIP + 8;
  const lengths = (side) => range(0, sizeOf(side)).map((cell) => cellName(side, cell).length);
  const longest = (side) => Math.max(...lengths(side)) * LETTER;
  const named = {
    left: Math.min(36 + longest("query"), 150, area / 3), top: Math.min(20 + longest("key"), 118),
  };
  const ticked = { left: 16 + Math.min(80, area / 6), top: 26 };
  const fit = ({ left, top }) => fittingCells(map, area - left - reserved, height - top - 8);
  const isSmall = (cells) => Math.min(...cells) < NAMED;
  let cells = fit(named);
  if (isSmall(cells)) cells = fit(ticked);
  cells = cells.map((size) => size * zoom);
  const [wide, high] = cells, isNamed = !isSmall(cells);
  const isFlat = isNamed && longest("key") + 10 <= wide;
  const { left, top } = isNamed ? named : ticked;
  layout = { wide, high, left, top: isFlat ? ticked.top : top, height, isNamed, isFlat };
}

function drawPlot() {
  layOut();
  const { map } = chosen, { wide, high, height, isNamed, isFlat } = layout, plot = byId("plot");
  const sizes = { rows: map.rows, columns: map.columns };
  for (const name of ["wide", "high", "left", "top"]) sizes[name] = `${layout[name]}px`;
  for (const [name, size] of Object.entries(sizes)) plot.style.setProperty(`--${name}`, size);
  plot.style.maxHeight = `${height + 4}px`;
  plot.classList.toggle("gridded", isNamed);
  plot.classList.toggle("tiny", Math.min(wide, high) < 1);
  plot.classList.toggle("upright", isNamed && !isFlat);
  const picture = byId("picture"), { head, sequence, scale, hideSinks } = choice;
  if (isStale(picture, head, sequence, scale, hideSinks)) paint(picture, map);
  drawNames();
  drawStrips();
  drawNumbers();
  drawPointed();
}

function label(at, text, kind = "") {
  const element = make("span", { class: kind, title: text }, text);
  element.style.setProperty("--at", at);
  return element;
}

// The least round number of cells that have room for a number.
function tickStep(size, room) {
  const steps = range(0, 6).flatMap((power) => [1, 2, 5].map((part) => part * 10 ** power));
  return steps.find((step) => step * size >= room) ?? 1;
}

function namesOf(side, step) {
  const first = chosen.map.first[side === "query" ? 0 : 1];
  const tick = (cell) => label(cell, String(Math.max(0, cell * chosen.map.block + first)), "tick");
  const name = (cell) => label(cell, cellName(side, cell));
  const cells = range(0, Math.ceil(sizeOf(side) / step)).map((i) => i * step);
  return cells.map(layout.isNamed ? name : tick);
}

function drawNames() {
  const { wide, high, isNamed } = layout;
  const [down, right] = isNamed ? [1, 1] : [tickStep(high, 26), tickStep(wide, 44)];
  const columns = [...new Set(chosen.sinks.map(cellOf))];
  const marks = columns.map((column) => label(column, "▾", "sink mark"));
  byId("row-names").replaceChildren(...namesOf("query", down));
  byId("column-names").replaceChildren(...namesOf("key", right), ...marks);
}

function drawStrips() {
  const drawn = strips();
  byId("strip-names").replaceChildren(...drawn.map(([name]) => span("sink", name)));
  const strip = ([, weights]) => make("div", { class: "strip" }, ...stripCells(weights));
  byId("strips").replaceChildren(...drawn.map(strip));
}

function stripCells(weights) {
  return Array.from(weights, (weight, row) => {
    if (weight === MASKED) return "";
    const cell = label(row, shortWeight(weight), weight > 0.8 ? "bright" : "dark");
    cell.style.setProperty("--weight", weight || 0);
    if (layout.high < NAMED) cell.textContent = "";
    return cell;
  });
}

// Numbers stand in the visible cells; `dataset` tells programs where the cells lie.
function drawNumbers() {
  const { wide, high } = layout, plot = byId("plot"), spans = [];
  const frame = plot.getBoundingClientRect(), box = byId("cells").getBoundingClientRect();
  const corner = { left: box.left - frame.left, top: box.top - frame.top };
  Object.assign(plot.dataset, { ...corner, wide, high, column: 0, row: 0 });
  if (wide >= NUMBERED && high >= 16) {
    const cells = cellsOf(chosen.map), { rows, columns } = chosen.map;
    const top = Math.floor(plot.scrollTop / high), left = Math.floor(plot.scrollLeft / wide);
    const bottom = Math.min(rows, top + plot.clientHeight / high + 1);
    const right = Math.min(columns, left + plot.clientWidth / wide + 1);
    for (let row = top; row < bottom; row++) {
      for (let column = left; column < right; column++) {
        const weight = cells[row * columns + column];
        if (weight !== MASKED) spans.push(numberIn({ row, column }, weight));
      }
    }
  }
  byId("numbers").replaceChildren(...spans);
}

function numberIn(cell, weight) {
  const element = span("cell");
  put(element, cell);
  if (weight === TAKEN) element.append("–");
  else {
    element.append(Number.isNaN(weight) ? "?" : shortWeight(weight, layout.wide >= 44 ? 3 : 2));
    const isDark = levelOf(weight) < RECORD.ink_from || Number.isNaN(weight);
    element.classList.add(isDark ? "dark" : "bright");
    element.style.background = `rgb(${colourOf(weight).slice(0, 3)})`;
  }
  return element;
}

function put(element, { row = 0, column = 0 }) {
  element.style.setProperty("--row", row);
  element.style.setProperty("--column", column);
}

// The frames of the chosen cell and of what the pointer rests on, with the names of row and column.
function drawFrames() {
  const own = { row: cellOf(choice.query), column: cellOf(choice.key) };
  const seen = cellInView()
    ?? { [pointed.side === "query" ? "row" : "column"]: cellOf(pointed.place) };
  const frame = byId("pointed");
  put(byId("cursor"), own);
  put(frame, seen);
  frame.classList.toggle("whole-row", seen.column === undefined);
  frame.classList.toggle("whole-column", seen.row === undefined);
  drawPlate(byId("row-plate"), "query", seen.row);
  drawPlate(byId("column-plate"), "key", seen.column);
}

// The cell under the pointer, or else the chosen one; null while the pointer is at a token.
function cellInView() {
  if (pointed) return pointed.side === "cell" ? pointed : null;
  return { side: "cell", row: cellOf(choice.query), column: cellOf(choice.key) };
}

// Names keep a plate's width, and the readout has the number. Labels below a plate are hidden.
function drawPlate(plate, side, cell) {
  plate.hidden = cell === undefined;
  if (!plate.hidden) {
    const name = cellName(side, cell);
    plate.textContent = layout.isNamed || chosen.map.block > 1 ? name : `${cell} ${name}`;
    plate.style.setProperty("--at", cell);
  }
  const box = plate.getBoundingClientRect();
  for (const name of plate.previousElementSibling.querySelectorAll(":not(.mark)")) {
    const { left, right, top, bottom } = name.getBoundingClientRect();
    const [x, y] = [Math.min(right, box.right) - Math.max(left, box.left),
      Math.min(bottom, box.bottom) - Math.max(top, box.top)];
    name.style.visibility = Math.min(x, y) > SPARE ? "hidden" : "";
  }
}
