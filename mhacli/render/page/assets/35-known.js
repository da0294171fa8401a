// What is known of a query, of a key and of a cell: single weights, the strongest keys of a query, or means of blocks.

// A part of a text: one token, or a block of them, from the first to the last place.
const single = (place) => ({ from: place, to: place });
const isSame = (a, b) => a.from === b.from && a.to === b.to;
const wordsOf = (side) => (side === "query" ? chosen.queries : chosen.keys);
const sizeOf = (side) => (side === "query" ? chosen.map.rows : chosen.map.columns);
const firstOf = (side) => chosen.map.first[side === "query" ? 0 : 1];

// Whether lists tell single tokens apart: their cells are known, or each query's strongest keys.
const hasTokens = () => chosen.map.block === 1 || chosen.strongest?.places === null;

// The parts of a text that lists show, in order.
function itemsOf(side) {
  if (hasTokens()) return wordsOf(side).map((_, place) => single(place));
  const cells = Array.from({ length: sizeOf(side) }, (_, cell) => placesOf(side, cell));
  return cells.filter((item) => item.from <= item.to);
}

// The tokens that a row or column stands for.
function placesOf(side, cell) {
  const { block } = chosen.map, from = cell * block + firstOf(side);
  return { from: Math.max(0, from), to: Math.min(wordsOf(side).length, from + block) - 1 };
}

function cellOf(side, place) {
  return Math.min(sizeOf(side) - 1, Math.max(0, Math.floor((place - firstOf(side)) / chosen.map.block)));
}

// A query's strongest keys with their shares, where the page has them.
function strongestOf(query) {
  const list = chosen.strongest, row = list?.places ? list.places.indexOf(query) : query;
  if (!list || row < 0) return null;
  const found = new Map();
  for (let i = row * list.k; i < (row + 1) * list.k; i++) {
    if (list.keys[i] < chosen.keys.length) found.set(list.keys[i], list.shares[i]);
  }
  return found;
}

// The share that one query gives one key; undefined where the page has only blocks.
function tokenShare(query, key) {
  const { map } = chosen;
  if (map.block > 1) return strongestOf(query)?.get(key);
  return map.cells[(query - map.first[0]) * map.columns + key - map.first[1]];
}

// What a query, or a block of them, gives to keys: entries of an item and its share. `isPart` where only the strongest keys
// are known.
function rowOf(item) {
  const { map } = chosen, isOne = item.from === item.to;
  if (isOne && map.block === 1) {
    return { entries: chosen.keys.map((_, key) => ({ ...single(key), share: tokenShare(item.from, key) })) };
  }
  const strongest = isOne ? strongestOf(item.from) : null;
  if (strongest?.size) return { entries: [...strongest].map(([key, share]) => ({ ...single(key), share })), isPart: true };
  const row = cellOf("query", item.from);
  return { entries: blockEntries("key", (column) => row * map.columns + column), isBlock: true };
}

// The same of a key: what queries give to it.
function columnOf(item) {
  const { map } = chosen;
  if (hasTokens()) {
    const all = chosen.queries.map((_, query) => ({ ...single(query), share: tokenShare(query, item.from) }));
    return { entries: all.filter((entry) => entry.share !== undefined), isPart: map.block > 1 };
  }
  const column = cellOf("key", item.from);
  return { entries: blockEntries("query", (row) => row * map.columns + column), isBlock: true };
}

function blockEntries(side, at) {
  const all = Array.from({ length: sizeOf(side) }, (_, cell) => ({ ...placesOf(side, cell), share: chosen.map.cells[at(cell)] }));
  return all.filter((entry) => entry.from <= entry.to);
}

function strongestKey(query) {
  return rowOf(single(query)).entries.reduce((best, entry) => (entry.share > best.share ? entry : best), { share: 0, from: 0 }).from;
}

// The record says which keys are sinks of a head; a map of blocks knows those that begin a text.
const hasSinks = () => chosen.map.sinks.length > 0;
const hasSink = (item) => chosen.map.sinks.some((place) => place >= item.from && place <= item.to);
