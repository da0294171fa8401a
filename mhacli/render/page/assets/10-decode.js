// What the page was given, and how its numbers are read.

const RECORD = JSON.parse(document.getElementById("record").textContent);
const FORBIDDEN = -1;
// Decoded cells that stay in memory; beyond, the map that was looked at longest ago is let go.
const ROOM = 12e6;

const decodedMaps = new Map();

// Numbers that Python deflated.
async function numbersOf(text, Kind = Float32Array) {
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Kind(await new Response(stream).arrayBuffer());
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
  const names = ["cells", "of_sinks", "left", "taken", "learned"];
  const [cells, ofSinks, left, taken, learned] = await Promise.all(names.map((name) => numbersOf(packed[name])));
  return { ...packed, index, cells, ofSinks, left, taken, learned, rest: null };
}

// The cells, or what is left of them beside sinks: Python says what sinks have of each row, and what is left.
function cellsOf(map) {
  if (!choice.hideSinks) return map.cells;
  const { columns, sink_columns: sinks, ofSinks, left } = map;
  map.rest ??= map.cells.map((share, i) => {
    if (share === FORBIDDEN) return share;
    const row = Math.floor(i / columns), sink = sinks.indexOf(i % columns);
    const own = sink < 0 ? 0 : ofSinks[row * sinks.length + sink];
    return Math.max(0, share - own) / left[row];
  });
  return map.rest;
}

// What the page has of a map beside its cells: the strongest keys of queries, and the arrays behind the weights.
async function loadDetails(index) {
  const { top, parts } = RECORD.maps[index], names = Object.keys(parts);
  const arrays = await Promise.all(names.map((name) => numbersOf(parts[name])));
  const [keys, shares] = await Promise.all([numbersOf(top?.keys, Uint32Array), numbersOf(top?.shares)]);
  return {
    strongest: top && { k: top.k, keys, shares },
    parts: Object.fromEntries(names.map((name, i) => [name, arrays[i]])),
  };
}
