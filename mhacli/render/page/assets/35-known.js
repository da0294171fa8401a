// What is known of a query, of a key and of a cell. A place is a token, or a block of them where
// only the means of blocks are known. A cell of the matrix is a place of a query and one of a key,
// or a block whose strongest weights are known.

// The words of all places, and which of them are or hold sinks.
function readTexts(map) {
  const layer = layerNow(), isOfBlocks = map.block > 1 && !map.keys;
  const texts = [layer.queries, layer.keys].map((family) => RECORD.texts[family[choice.sequence]]);
  const blocks = (count, axis) => range(0, count).map((cell) => {
    const from = cell * map.block + map.first[axis];
    return rangeText(Math.max(0, from), Math.min(texts[axis].length, from + map.block) - 1);
  });
  const [query, key] = isOfBlocks ? [map.rows, map.columns].map(blocks) : texts;
  const blockOf = (place) => Math.floor((place - map.first[1]) / map.block);
  const sinks = map.keys ? map.sinks : map.sinks.map(blockOf);
  return { isOfBlocks, sinks, perCell: map.keys ? map.block : 1, words: { query, key } };
}

const otherOf = (side) => (side === "query" ? "key" : "query");
const wordsOf = (side) => chosen.words[side];
const sizeOf = (side) => cellOf(wordsOf(side).length - 1) + 1;

// The row or column of a place, and the first and last place of a row or column.
const cellOf = (place) => Math.floor(place / chosen.perCell);

function placesOf(side, cell) {
  const from = cell * chosen.perCell;
  return [from, Math.min(wordsOf(side).length, from + chosen.perCell) - 1];
}

// The weight that a query gives a key; undefined where it is not known.
function weightAt(query, key) {
  const { cells, columns, keys, weights } = chosen.map;
  if (!keys) return cells[query * columns + key];
  const count = keys.length / wordsOf("query").length;
  const at = keys.subarray(query * count, (query + 1) * count).indexOf(key);
  return at < 0 ? undefined : weights[query * count + at];
}

// What a query gives to keys, or queries to a key: places with their weights, where they are known.
function weightsOf(side, place) {
  const weight = side === "query" ? (at) => weightAt(place, at) : (at) => weightAt(at, place);
  const entries = wordsOf(otherOf(side)).map((_, at) => ({ place: at, weight: weight(at) }));
  return entries.filter((entry) => entry.weight !== undefined);
}

// The largest known weight of a cell; its first query and key where none is known.
function strongestIn({ row, column }) {
  const [query, last] = placesOf("query", row), [key, end] = placesOf("key", column);
  const weights = range(query, last - query + 1).flatMap((from) =>
    range(key, end - key + 1).map((to) => ({ query: from, key: to, weight: weightAt(from, to) })));
  return largestOf(weights) ?? { query, key };
}

const largestOf = (entries) =>
  entries.reduce((best, entry) => (entry.weight > (best?.weight ?? 0) ? entry : best), null);
const strongestKey = (query) => largestOf(weightsOf("query", query))?.place ?? 0;
