// Pointer and keys over the matrix: looking, choosing, zooming, moving.

let drag = null;

function buildMatrix() {
  matrix.canvas = make("canvas", { id: "matrix", tabindex: 0, role: "application", "aria-roledescription": "attention matrix" });
  matrix.canvas.setAttribute("aria-describedby", "readout");
  matrix.overlay = make("canvas", { id: "matrix-cursor", "aria-hidden": "true" });
  const plot = make("div", { class: "plot" }, matrix.canvas, matrix.overlay);
  const zoom = make("div", { class: "zoom", role: "group", "aria-label": "zoom" });
  const buttons = [
    ["−", "zoom out", () => zoomBy(1 / 1.5)],
    ["+", "zoom in", () => zoomBy(1.5)],
    ["fit", "fit all cells", fitAll],
  ];
  for (const [text, label, act] of buttons) {
    const button = make("button", { type: "button", "aria-label": label, title: label }, text);
    button.addEventListener("click", act);
    zoom.append(button);
  }
  const bar = make("div", { class: "bar" }, make("p", { id: "legend" }), zoom);
  byId("matrix-area").append(plot, bar);
  listenToMatrix(matrix.canvas);
}

function listenToMatrix(canvas) {
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, view: matrix.view && { ...matrix.view }, isMoved: false };
    if (matrix.view) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", moveOver);
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.isMoved) pin(cellAt(event));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("keydown", pressOnMatrix);
  canvas.addEventListener("wheel", turnWheel, { passive: false });
}

// The cell under the pointer, null beside the plot.
function cellAt(event) {
  const { layout } = matrix, box = matrix.canvas.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  const row = Math.floor((y - layout.top) / layout.high + layout.y);
  const column = Math.floor((x - layout.left) / layout.wide + layout.x);
  if (y < layout.top || y >= layout.top + layout.plot.height || row >= chosen.map.rows) return null;
  const strip = layout.strips.find((one) => x >= one.x && x < one.x + one.width);
  const query = placesOf("query", row);
  if (strip) return { side: "cell", row, strip, query };
  if (x < layout.left || x >= layout.left + layout.plot.width || column >= chosen.map.columns) return null;
  return { side: "cell", row, column, query, key: placesOf("key", column) };
}

function moveOver(event) {
  if (drag?.view && (drag.isMoved || Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4)) {
    drag.isMoved = true;
    moveView(drag.view, drag.x - event.clientX, drag.y - event.clientY);
    return;
  }
  const cell = cellAt(event);
  if (cell?.row !== pointed?.row || cell?.column !== pointed?.column || cell?.strip?.name !== pointed?.strip?.name) point(cell);
}

function pin(cell) {
  if (cell !== null) choose({ query: cell.query.from, key: cell.key?.from ?? choice.key, side: "query" });
}

function moveView(view, right, down) {
  const { wide, high } = matrix.layout;
  matrix.view = { ...view, x: view.x + right / wide, y: view.y + down / high };
  drawPlot();
}

// Larger or smaller around a place of the plot area, which stays where it is: under the pointer, or the chosen cell.
function zoomBy(by, around = null) {
  const { layout } = matrix, before = matrix.view?.zoom ?? 1, fitted = layout.wide / before;
  const zoom = Math.min(before * by, Math.max(1, LARGEST_CELL / fitted));
  if (zoom <= 1.01) return fitAll();
  const fixed = around ?? middleOfChosen(layout);
  const column = (fixed.x - layout.left) / layout.wide + layout.x;
  const row = (fixed.y - layout.top) / layout.high + layout.y;
  const shift = leftOfPlot(layout);
  matrix.view = { zoom, x: 0, y: 0 };
  const next = layoutMatrix(matrix.canvas.getContext("2d"));
  matrix.view.x = column - (fixed.x + shift - leftOfPlot(next) - next.left) / next.wide;
  matrix.view.y = row - (fixed.y - next.top) / next.high;
  if (around === null) bringIntoView();
  drawPlot();
}

// A plot that is narrower than its area stands in the middle.
const leftOfPlot = (layout) => (byId("matrix-area").clientWidth - layout.width) / 2;

function middleOfChosen(layout) {
  const row = cellOf("query", choice.query), column = cellOf("key", choice.key);
  return { x: xOf(layout, column + 0.5), y: yOf(layout, row + 0.5) };
}

function fitAll() {
  matrix.view = null;
  drawPlot();
}

// A zoomed view follows the chosen cell.
function bringIntoView() {
  if (!matrix.view) return;
  const follow = (start, cell, room) => (cell < start ? cell : cell + 1 > start + room ? cell + 1 - room : start);
  const { wide, high, plot } = layoutMatrix(matrix.canvas.getContext("2d"));
  matrix.view.x = follow(matrix.view.x, cellOf("key", choice.key), plot.width / wide);
  matrix.view.y = follow(matrix.view.y, cellOf("query", choice.query), plot.height / high);
}

function turnWheel(event) {
  const isZoom = event.ctrlKey || event.metaKey;
  if (!isZoom && !(matrix.view && document.activeElement === matrix.canvas)) return; // the page scrolls
  event.preventDefault();
  if (!isZoom) return moveView(matrix.view, event.deltaX, event.deltaY);
  const box = matrix.canvas.getBoundingClientRect();
  zoomBy(event.deltaY < 0 ? 1.25 : 0.8, { x: event.clientX - box.left, y: event.clientY - box.top });
}

const STEPS = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0],
};

function pressOnMatrix(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const act = matrixKeys(event.key);
  if (!act) return;
  event.preventDefault();
  act();
}

function matrixKeys(key) {
  if (STEPS[key]) return () => stepCell(...STEPS[key]);
  return {
    Home: () => stepCell(0, -Infinity),
    End: () => stepCell(0, Infinity),
    Enter: () => choose({ key: strongestKey(choice.query), side: "query" }),
    "+": () => zoomBy(1.5),
    "=": () => zoomBy(1.5),
    "-": () => zoomBy(1 / 1.5),
    0: fitAll,
    "[": () => stepHead(-1),
    "]": () => stepHead(1),
  }[key];
}

function stepCell(down, right) {
  pointed = null;
  choose({ query: stepped("query", down), key: stepped("key", right), side: "query" });
}

// The first token so many cells further; padding is stepped over.
function stepped(side, by) {
  const place = choice[side], count = wordsOf(side).length;
  if (by === 0) return place;
  const next = placesOf(side, cellOf(side, place) + by);
  return Number.isFinite(by) ? Math.max(0, Math.min(count - 1, next.from)) : by < 0 ? 0 : count - 1;
}

const stepHead = (by) => choose({ head: Math.max(0, Math.min(HEADS.length - 1, choice.head + by)) });

function drawPlot() {
  drawMatrix();
  drawCursor();
  drawReadout();
  drawLegend();
}
