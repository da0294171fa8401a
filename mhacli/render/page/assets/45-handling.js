// Pointer and keys over the matrix: looking, choosing, zooming, moving.

let drag = null;

function listenToMatrix() {
  const plot = byId("plot"), zoomButtons = document.querySelector(".zoom");
  plot.addEventListener("pointermove", moveOver);
  plot.addEventListener("pointerleave", () => point(null));
  plot.addEventListener("pointerdown", ({ clientX, clientY, pointerType }) => {
    const start = { x: clientX + plot.scrollLeft, y: clientY + plot.scrollTop, isMoved: false };
    drag = pointerType === "mouse" ? start : null;
  });
  plot.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell && !drag?.isMoved) chooseCell(cell);
    drag = null;
  });
  plot.addEventListener("keydown", (event) => {
    const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (isPlain && press(event.key)) event.preventDefault();
  });
  plot.addEventListener("wheel", zoomByWheel, { passive: false });
  plot.addEventListener("scroll", drawNumbers);
  zoomButtons.addEventListener("click", ({ target }) => press(target.dataset.key));
}

// The cell under the pointer, null beside the plot and on the names that hide cells.
function cellAt({ target, clientX, clientY }) {
  const cells = byId("cells"), box = cells.getBoundingClientRect();
  if (!cells.contains(target)) return null;
  const row = Math.floor((clientY - box.top) / layout.high);
  const column = Math.floor((clientX - box.left) / layout.wide);
  const isInside = row >= 0 && column >= 0 && row < chosen.map.rows && column < chosen.map.columns;
  return isInside ? { side: "cell", row, column } : null;
}

function moveOver(event) {
  const plot = byId("plot");
  if (!(event.buttons & 1)) drag = null;
  if (!drag || zoom === 1) return point(cellAt(event));
  const left = drag.x - event.clientX, top = drag.y - event.clientY;
  drag.isMoved ||= Math.hypot(left - plot.scrollLeft, top - plot.scrollTop) > 4;
  if (!drag.isMoved) return;
  plot.setPointerCapture(event.pointerId);
  plot.scrollTo(left, top);
  drawNumbers();
}

// Larger or smaller around a place of the window that stays: under the pointer, or the chosen cell.
function zoomBy(by, at) {
  const { wide, high } = layout, cells = byId("cells"), before = cells.getBoundingClientRect();
  const row = (at.y - before.top) / high, column = (at.x - before.left) / wide;
  zoom = between(1, Math.max(1, (MAX_CELL * zoom) / wide), zoom * by);
  drawPlot();
  const after = cells.getBoundingClientRect();
  const left = after.left + column * layout.wide - at.x, top = after.top + row * layout.high - at.y;
  byId("plot").scrollBy(left, top);
  drawNumbers();
}

function zoomByWheel(event) {
  if (!event.ctrlKey && !event.metaKey) return; // the page or the plot scrolls
  event.preventDefault();
  zoomBy(event.deltaY < 0 ? 1.25 : 0.8, { x: event.clientX, y: event.clientY });
}

function zoomAtCursor(by) {
  const { left, top, width, height } = byId("cursor").getBoundingClientRect();
  zoomBy(by, { x: left + width / 2, y: top + height / 2 });
  followCursor();
}

// A zoomed plot follows the chosen cell.
function followCursor() {
  const plot = byId("plot"), frame = plot.getBoundingClientRect();
  const cell = byId("cursor").getBoundingClientRect();
  const beyond = (start, end, from, to) => Math.min(0, start - from) + Math.max(0, end - to);
  const left = frame.left + layout.left + strips().length * STRIP;
  plot.scrollBy(
    beyond(cell.left, cell.right, left, frame.left + plot.clientWidth),
    beyond(cell.top, cell.bottom, frame.top + layout.top, frame.top + plot.clientHeight),
  );
}

const STEPS = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
  PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -Infinity], End: [0, Infinity],
};
const KEYS = {
  Enter: () => choose({ key: strongestKey(choice.query), side: "query" }),
  "+": () => zoomAtCursor(1.5),
  "=": () => zoomAtCursor(1.5),
  "-": () => zoomAtCursor(1 / 1.5),
  0: () => zoomAtCursor(0),
  "[": () => stepHead(-1),
  "]": () => stepHead(1),
};

// Whether a key, or a button that stands for it, does something.
function press(key) {
  if (STEPS[key]) {
    const [down, right] = STEPS[key];
    pointed = null;
    chooseCell({ row: stepped("query", down), column: stepped("key", right) });
  }
  KEYS[key]?.();
  return key in STEPS || key in KEYS;
}

const stepped = (side, by) => between(0, sizeOf(side) - 1, cellOf(choice[side]) + by);

// Of a block its strongest weight is chosen.
function chooseCell(cell) {
  const { query, key } = strongestIn(cell);
  choose({ query, key, side: "query" });
}
