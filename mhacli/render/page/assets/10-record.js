// What the page was given, and how its numbers are read and coloured.

const RECORD = JSON.parse(document.getElementById("record").textContent);
const HEADS = RECORD.heads;
// Cells that have no weight: masked ones, and sinks that were taken out.
const FORBIDDEN = -1, TAKEN = -2;

// Numbers that Python deflated.
async function numbersOf(text) {
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Float32Array(await new Response(stream).arrayBuffer());
}

// The numbers of several texts by their names, read at the same time.
async function allNumbersOf(texts) {
  const read = async ([name, text]) => [name, await numbersOf(text)];
  return Object.fromEntries(await Promise.all(Object.entries(texts).map(read)));
}

const packedMap = (head) => RECORD.maps[head * RECORD.numbers.length + choice.sequence];

// The map of a head of the chosen sequence: cells row by row, and what sinks have of them.
async function loadMap(head) {
  const { numbers, ...map } = packedMap(head);
  return { ...map, ...(await allNumbersOf(numbers)) };
}

// The arrays behind the weights.
const loadArrays = (head) => allNumbersOf(packedMap(head).parts);

// The cells, or what is left of them beside sinks: Python says what sinks have of each row, and what is left.
function cellsOf(map) {
  if (!choice.hideSinks) return map.cells;
  return map.cells.map((share, i) => {
    if (share === FORBIDDEN) return share;
    const row = Math.floor(i / map.columns), sink = map.sink_columns.indexOf(i % map.columns);
    if (sink >= 0 && map.block === 1) return TAKEN;
    const own = sink < 0 ? 0 : map.of_sinks[row * map.sink_columns.length + sink];
    return Math.max(0, share - own) / map.left[row];
  });
}

// The scale is one for all heads, and another where sinks are taken out.
const scaleNow = () => RECORD.scales[Number(choice.hideSinks)];

// The level of a weight, 0 … 255.
function levelOf(share) {
  const { top } = scaleNow();
  const log = () => 1 + Math.log10(Math.max(share, Number.MIN_VALUE) / top) / RECORD.decades;
  const part = choice.scale === "log" ? log() : share / top;
  return Math.round(255 * Math.min(1, Math.max(0, part)));
}

// Red, green, blue and how much they cover: grey of either theme where masked.
function colourOf(share) {
  if (share === FORBIDDEN) return [110, 125, 145, 70];
  if (share === TAKEN) return [0, 0, 0, 0];
  const colour = Number.isNaN(share) ? RECORD.lost : RECORD.ramp[levelOf(share)];
  return [...colour, 255];
}

// A map on a canvas, one pixel a cell.
function paint(canvas, map) {
  Object.assign(canvas, { width: map.columns, height: map.rows });
  const image = new ImageData(map.columns, map.rows);
  cellsOf(map).forEach((share, i) => image.data.set(colourOf(share), 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
}
