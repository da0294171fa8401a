// What is known of a query, of a key and of a cell. A place is a token, or where only means of blocks are known a block of them;
// a cell of the matrix is such a place, or a block of tokens whose strongest weights are known.

// The words of all places, and which of them are sinks.
function readTexts(map, strongest, texts) {
  const isOfBlocks = map.block > 1 && !strongest;
  const names = (side) => Array.from({ length: side ? map.columns : map.rows }, (_, cell) => {
    const from = cell * map.block + map.first[side];
    return rangeText(Math.max(0, from), Math.min(texts[side].length, from + map.block) - 1);
  });
  const [query, key] = isOfBlocks ? [names(0), names(1)] : texts;
  const sinks = isOfBlocks ? map.sinks.map((place) => Math.floor((place - map.first[1]) / map.block)) : map.sinks;
  return { isOfBlocks, words: { query, key }, sinks, block: isOfBlocks ? 1 : map.block };
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

// What a query gives to keys, and what queries give to a key: places with their shares, as far as they are known.
const rowOf = (query) => known(wordsOf("key"), (key) => shareOf(query, key));
const columnOf = (key) => known(wordsOf("query"), (query) => shareOf(query, key));

function known(words, share) {
  return words.map((_, place) => ({ place, share: share(place) })).filter((entry) => entry.share !== undefined);
}

function strongestKey(query) {
  return rowOf(query).reduce((best, entry) => (entry.share > best.share ? entry : best), { share: 0, place: 0 }).place;
}

// The record says which keys are sinks of a head; a map of blocks knows those that begin a text.
const hasSinks = () => chosen.sinks.length > 0;
const hasSink = ({ from, to }) => chosen.sinks.some((place) => place >= from && place <= to);
