// What is known of a query, of a key and of a cell: exactly, in few bits, or as a block's mean.

// A part of a text: one token, or a block of them, from the first to the last place.
const single = (place) => ({ from: place, to: place });
const isSame = (a, b) => a.from === b.from && a.to === b.to;
const wordsOf = (side) => (side === "query" ? chosen.queries : chosen.keys);

// So many strongest keys of each query say more of it than the mean of its block.
const ENOUGH_KEYS = 4;

// Whether single tokens are told apart in lists: their cells are known, or enough of each query's strongest keys.
const hasTokens = () => chosen.map.block === 1 || (chosen.exact.top?.k ?? 0) >= ENOUGH_KEYS;

// The parts of a text that lists show, in order.
function itemsOf(side) {
  const count = wordsOf(side).length, { map, exact } = chosen;
  if (hasTokens()) return Array.from({ length: count }, (_, place) => single(place));
  const items = [];
  const own = side === "query" ? [...(exact.rows?.places ?? []), ...(exact.asked?.places ?? [])].map(single) : [];
  for (let cell = 0; cell < (side === "query" ? map.rows : map.columns); cell++) {
    const item = placesOf(map, side, cell);
    if (item.from <= item.to) items.push(item);
  }
  const all = items.concat(own.filter((one, i) => own.findIndex((other) => isSame(one, other)) === i));
  return all.sort((a, b) => a.from - b.from || b.to - a.to);
}

// The tokens that a row or column stands for.
function placesOf(map, side, cell) {
  const first = map.first[side === "query" ? 0 : 1], from = cell * map.block + first;
  return { from: Math.max(0, from), to: Math.min(wordsOf(side).length, from + map.block) - 1 };
}

function cellOf(map, side, place) {
  const last = (side === "query" ? map.rows : map.columns) - 1;
  return Math.min(last, Math.max(0, Math.floor((place - map.first[side === "query" ? 0 : 1]) / map.block)));
}

// A query's whole row, where it was kept.
function keptRow(place) {
  const at = chosen.exact.rows?.places.indexOf(place) ?? -1, count = chosen.keys.length;
  return at < 0 ? null : chosen.exact.rows.shares.subarray(at * count, (at + 1) * count);
}

// A query's strongest keys with their shares, where they were kept.
function strongestOf(place) {
  const { top, asked } = chosen.exact, at = asked?.places.indexOf(place) ?? -1;
  const [list, row] = at >= 0 ? [asked, at] : [top, place];
  if (!list) return null;
  const found = new Map();
  for (let i = row * list.k; i < (row + 1) * list.k; i++) {
    if (list.keys[i] < chosen.keys.length) found.set(list.keys[i], list.shares[i]);
  }
  return found;
}

// The share that one query gives one key, and how well it is known: {share, isExact, error}; null where only blocks are.
function tokenShare(query, key) {
  const { map } = chosen, kept = keptRow(query);
  if (kept) return { share: kept[key], isExact: true };
  const strongest = strongestOf(query);
  if (strongest?.has(key)) return { share: strongest.get(key), isExact: true };
  if (map.block > 1) return null;
  const row = query - map.first[0], column = key - map.first[1], share = map.cells[row * map.columns + column];
  const isExact = map.isExact || share === FORBIDDEN;
  return { share, isExact, error: isExact ? 0 : codeError(map, row, column) };
}

// What a query, or a block of them, gives to keys: entries of an item, its share and whether that is exact. `isPart` where
// only the strongest keys are known.
function rowOf(item) {
  const { map } = chosen;
  if (isSame(item, single(item.from))) {
    if (map.block === 1 || keptRow(item.from)) {
      return { entries: chosen.keys.map((_, key) => ({ ...single(key), ...tokenShare(item.from, key) })) };
    }
    const strongest = strongestOf(item.from);
    if (strongest?.size >= Math.min(ENOUGH_KEYS, chosen.keys.length)) {
      return { entries: [...strongest].map(([key, share]) => ({ ...single(key), share, isExact: true })), isPart: true };
    }
  }
  const row = cellOf(map, "query", item.from);
  return { entries: blockEntries("key", map.columns, (column) => row * map.columns + column), isBlock: true };
}

// The same of a key: what queries give to it.
function columnOf(item) {
  const { map } = chosen;
  if (hasTokens()) {
    const all = chosen.queries.map((_, query) => ({ ...single(query), ...tokenShare(query, item.from) }));
    return { entries: all.filter((entry) => entry.share !== undefined), isPart: map.block > 1 };
  }
  const column = cellOf(map, "key", item.from);
  return { entries: blockEntries("query", map.rows, (row) => row * map.columns + column), isBlock: true };
}

function blockEntries(side, count, at) {
  const { map } = chosen, entries = [];
  for (let cell = 0; cell < count; cell++) {
    const item = placesOf(map, side, cell);
    if (item.from <= item.to) entries.push({ ...item, share: map.cells[at(cell)], isExact: map.code === "f32" });
  }
  return entries;
}

function strongestKey(query) {
  let strongest = { share: 0, from: 0 };
  for (const entry of rowOf(single(query)).entries) if (entry.share > strongest.share) strongest = entry;
  return strongest.from;
}

// The record says which keys are sinks of a head; a map of blocks knows those that begin a text.
const hasSinks = () => chosen.map.sinks.length > 0;
const hasSink = (item) => chosen.map.sinks.some((place) => place >= item.from && place <= item.to);
