// What the page was given, and how its numbers are read.

const RECORD = JSON.parse(document.getElementById("record").textContent);
const FORBIDDEN = -1;
const CODES = { f32: Float32Array, u8: Uint8Array };
// Decoded cells that stay in memory; beyond, the map that was looked at longest ago is let go.
const ROOM = 12e6;

const decodedMaps = new Map();
const decodedMasks = new Map();

// Bytes that Python deflated.
async function inflated(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function numbersOf(text, Kind) {
  return text === null || text === undefined ? null : new Kind(await inflated(text));
}

// One byte per cell: whether it may be attended.
function openCells(index) {
  if (!decodedMasks.has(index)) decodedMasks.set(index, unpackedMask(RECORD.masks[index]));
  return decodedMasks.get(index);
}

async function unpackedMask(mask) {
  const bytes = await numbersOf(mask.bits, Uint8Array);
  const open = new Uint8Array(mask.rows * mask.columns);
  for (let i = 0; i < open.length; i++) open[i] = (bytes[i >> 3] >> (7 - (i & 7))) & 1;
  return open;
}

// The map of a head and sequence: cells row by row, FORBIDDEN where no key may be attended, NaN for what is no number.
function loadMap(index) {
  if (!decodedMaps.has(index)) decodedMaps.set(index, decodeMap(index));
  const map = decodedMaps.get(index);
  decodedMaps.delete(index); // and in again: the last one is the one looked at most recently
  decodedMaps.set(index, map);
  map.then(forgetOldMaps);
  return map;
}

function forgetOldMaps(newest) {
  const most = Math.max(2, Math.floor(ROOM / newest.cells.length));
  for (const index of decodedMaps.keys()) {
    if (decodedMaps.size <= most) return;
    decodedMaps.delete(index);
  }
}

async function decodeMap(index) {
  const packed = RECORD.maps[index];
  const { rows, columns } = RECORD.masks[packed.mask];
  const [open, codes, sinkShares, learned, seen] = await Promise.all([
    openCells(packed.mask),
    numbersOf(packed.cells, CODES[packed.code]),
    numbersOf(packed.of_sinks, Float32Array),
    numbersOf(packed.learned, Float32Array),
    numbersOf(packed.seen, Float32Array),
  ]);
  const cells = packed.code === "f32" ? codes : sharesOfCodes(codes, packed.largest);
  const ofSinks = new Float32Array(cells.length), sinkColumns = packed.sink_columns, width = sinkColumns.length;
  sinkShares.forEach((share, i) => (ofSinks[Math.floor(i / width) * columns + sinkColumns[i % width]] = share));
  // Codes are of what is left beside sinks, so that taking sinks out leaves no rounding behind.
  if (cells !== codes) ofSinks.forEach((share, i) => (cells[i] += share));
  for (let i = 0; i < cells.length; i++) if (!open[i]) cells[i] = FORBIDDEN;
  return {
    index, rows, columns, cells, learned, seen, ofSinks,
    block: packed.block, first: packed.first, sinks: packed.sinks,
    isExact: cells === codes && packed.block === 1, code: packed.code, top: packed.largest,
  };
}

// Whole numbers stand for square roots, so that small shares keep more of their digits; the largest one is no number.
const STEPS_OF_CODE = 254;
const sharesOfCodes = (codes, top) =>
  Float32Array.from(codes, (code) => (code > STEPS_OF_CODE ? NaN : top * (code / STEPS_OF_CODE) ** 2));

// How far a coded share may be from what was computed: half a step of its code, of what is not a sink's.
function codeError(map, row, column) {
  const at = row * map.columns + column, rest = Math.max(0, map.cells[at] - map.ofSinks[at]);
  const root = map.top > 0 ? Math.sqrt(rest / map.top) * STEPS_OF_CODE : 0;
  return map.top * ((root + 0.5) / STEPS_OF_CODE) ** 2 - rest;
}

// What is known exactly of a map beside its cells: whole rows, and the strongest keys of queries.
async function loadExact(index) {
  const { top, rows, asked } = RECORD.maps[index];
  const [topKeys, topShares, rowShares, askedKeys, askedShares] = await Promise.all([
    numbersOf(top?.keys, Uint32Array), numbersOf(top?.shares, Float32Array),
    numbersOf(rows?.shares, Float32Array),
    numbersOf(asked?.keys, Uint32Array), numbersOf(asked?.shares, Float32Array),
  ]);
  return {
    top: top ? { k: top.k, keys: topKeys, shares: topShares } : null,
    rows: rows ? { places: rows.places, shares: rowShares } : null,
    asked: asked ? { places: asked.places, k: asked.k, keys: askedKeys, shares: askedShares } : null,
  };
}
