// What is known of a query, of a key and of a cell. A place is a token, or where only means of blocks are known a block of them;
// a cell of the matrix is such a place, or a block of tokens whose strongest weights are known.

// The words of all places, and which of them are sinks.
function readTexts(map, strongest) {
  const layer = RECORD.layers[HEADS[choice.head].layer];
  const texts = [layer.queries, layer.keys].map((family) => RECORD.texts[family[choice.sequence]]);
  if (map.block === 1 || strongest) {
    return { isOfBlocks: false, block: map.block, sinks: map.sinks, words: { query: texts[0], key: texts[1] } };
  }
  const blocks = (count, text, first) => range(0, count).map((cell) => {
    const from = cell * map.block + first;
    return rangeText(Math.max(0, from), Math.min(text.length, from + map.block) - 1);
  });
  const words = { query: blocks(map.rows, texts[0], map.first[0]), key: blocks(map.columns, texts[1], map.first[1]) };
  return { isOfBlocks: true, block: 1, sinks: map.sinks.map((place) => Math.floor((place - map.first[1]) / map.block)), words };
}

const wordsOf = (side) => chosen.words[side];
const sizeOf = (side) => (side === "query" ? chosen.map.rows : chosen.map.columns);

// The places of a row or column, and the other way round.
function placesOf(side, cell) {
  const from = cell * chosen.block;
  return { from, to: Math.min(wordsOf(side).length, from + chosen.block) - 1 };
}

const cellOf = (side, place) => Math.floor(place / chosen.block);

// A query's strongest keys with their shares, where the page has them.
function strongestOf(query) {
  const { k, keys, shares } = chosen.strongest ?? { k: 0 }, found = new Map();
  for (let i = query * k; i < (query + 1) * k; i++) if (keys[i] < wordsOf("key").length) found.set(keys[i], shares[i]);
  return found;
}

// The share that a query gives a key; undefined where it is not known.
function shareOf(query, key) {
  return chosen.block > 1 ? strongestOf(query).get(key) : chosen.map.cells[query * chosen.map.columns + key];
}

// What a query gives to keys, or what queries give to a key: places with their shares, as far as they are known.
function sharesOf(side, place) {
  const share = side === "query" ? (key) => shareOf(place, key) : (query) => shareOf(query, place);
  const other = side === "query" ? "key" : "query";
  return wordsOf(other).map((_, at) => ({ place: at, share: share(at) })).filter((entry) => entry.share !== undefined);
}

const largestOf = (entries) => entries.reduce((best, entry) => (entry.share > (best?.share ?? 0) ? entry : best), null);
const strongestKey = (query) => largestOf(sharesOf("query", query))?.place ?? 0;

// The record says which keys are sinks of a head; a map of blocks knows those that begin a text.
const hasSink = ({ from, to }) => chosen.sinks.some((place) => place >= from && place <= to);
