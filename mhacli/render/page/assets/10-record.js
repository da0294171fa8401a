// What the page was given, and how its numbers are read and coloured.

const RECORD = JSON.parse(document.getElementById("record").textContent);
const HEADS = RECORD.heads;
// Cells that have no weight: masked ones, and sinks that were taken out.
const MASKED = -1, TAKEN = -2;

// The digits of base 85 in which Python writes bytes.
const DIGITS =
  "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%/()*+-;,=.?@^_`{|}~";
const VALUES = Uint8Array.from({ length: 128 }, (_, code) =>
  Math.max(0, DIGITS.indexOf(String.fromCharCode(code))));

function bytesOf(text) {
  const valueAt = (i) => (i < text.length ? VALUES[text.charCodeAt(i)] : 84);
  const words = new DataView(new ArrayBuffer(4 * Math.ceil(text.length / 5)));
  for (let at = 0; at < text.length; at += 5) {
    let word = 0;
    for (let i = at; i < at + 5; i++) word = 85 * word + valueAt(i);
    words.setUint32((4 * at) / 5, word);
  }
  return words.buffer.slice(0, Math.floor((4 * text.length) / 5));
}

// Numbers that Python deflated, the first bytes of all before the second bytes.
async function numbersOf(text, Kind) {
  if (!text) return null;
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const parts = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = Kind.BYTES_PER_ELEMENT, count = parts.length / size;
  const bytes = new Uint8Array(parts.length);
  parts.forEach((byte, i) => { bytes[(i % count) * size + Math.floor(i / count)] = byte; });
  return new Kind(bytes.buffer);
}

// The numbers of several texts by their names, read at the same time.
async function allNumbersOf(texts, Kind = Float32Array) {
  const read = async ([name, text]) => [name, await numbersOf(text, Kind)];
  return Object.fromEntries(await Promise.all(Object.entries(texts).map(read)));
}

// Weights of three digits: masked, not a number and 0, then 900 codes for every power of ten.
const weightOf = (code) => [MASKED, NaN, 0][code]
  ?? Number(`${100 + ((code - 3) % 900)}e${Math.floor((code - 3) / 900) - 42}`);

const packedMap = (head) => RECORD.maps[head * RECORD.numbers.length + choice.sequence];

// The map of a head of the chosen sequence: cells row by row, and what sinks have of them.
async function loadMap(head) {
  const { numbers, rounded, ...map } = packedMap(head);
  const codes = await numbersOf(rounded, Uint16Array);
  const cells = codes && { cells: Float32Array.from(codes, weightOf) };
  return { ...map, ...(await allNumbersOf(numbers)), ...cells };
}

// The arrays behind the weights.
const loadArrays = (head) => allNumbersOf(packedMap(head).parts);

// Each query's strongest keys, -1 where it sees no more, and weights; nothing if the map has all.
async function loadStrongest(head) {
  const { keys, shares: codes } = await allNumbersOf(packedMap(head).strongest, Uint16Array);
  codes?.forEach((less, i) => { if (i % RECORD.n_keys) codes[i] = codes[i - 1] - less; });
  const weights = codes && Float32Array.from(codes, weightOf);
  return keys && { keys: Int32Array.from(keys, (key) => key - 1), weights };
}

// The cells, or what is left of them beside sinks: Python says it of each row and column of a sink.
function cellsOf(map) {
  if (!choice.hideSinks) return map.cells;
  return map.cells.map((weight, i) => {
    if (weight === MASKED) return weight;
    const row = Math.floor(i / map.columns), sink = map.sink_columns.indexOf(i % map.columns);
    if (sink >= 0 && map.block === 1) return TAKEN;
    const left = sink < 0 ? weight : map.beside_sinks[row * map.sink_columns.length + sink];
    return left / map.left[row];
  });
}

// The scale is one for all heads, and another where sinks are taken out.
const scaleNow = () => RECORD.scales[Number(choice.hideSinks)];

// The level of a weight, 0 … 255.
function levelOf(weight) {
  const { top } = scaleNow();
  const log = () => 1 + Math.log10(Math.max(weight, Number.MIN_VALUE) / top) / RECORD.decades;
  const part = choice.scale === "log" ? log() : weight / top;
  return Math.round(255 * Math.min(1, Math.max(0, part)));
}

// Red, green, blue and how much they cover: grey of either theme where masked.
function colourOf(weight) {
  if (weight === MASKED) return [110, 125, 145, 70];
  if (weight === TAKEN) return [0, 0, 0, 0];
  const colour = Number.isNaN(weight) ? RECORD.lost : RECORD.ramp[levelOf(weight)];
  return [...colour, 255];
}

// A map on a canvas, one pixel a cell.
function paint(canvas, map) {
  Object.assign(canvas, { width: map.columns, height: map.rows });
  const image = new ImageData(map.columns, map.rows);
  cellsOf(map).forEach((weight, i) => image.data.set(colourOf(weight), 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
}
