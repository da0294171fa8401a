// What is known of a query, of a key and of a cell. A place is a row or a column of the map: a token, or a block of tokens where
// the page has the means of blocks.

// The words of all places, and which of them are or hold sinks.
function readTexts(map) {
  const layer = RECORD.layers[HEADS[choice.head].layer], isOfBlocks = map.block > 1;
  const texts = [layer.queries, layer.keys].map((family) => RECORD.texts[family[choice.sequence]]);
  const blocks = (count, text, first) => range(0, count).map((cell) => {
    const from = cell * map.block + first;
    return rangeText(Math.max(0, from), Math.min(text.length, from + map.block) - 1);
  });
  const words = isOfBlocks ? [blocks(map.rows, texts[0], map.first[0]), blocks(map.columns, texts[1], map.first[1])] : texts;
  const sinks = map.sinks.map((place) => Math.floor((place - map.first[1]) / map.block));
  return { isOfBlocks, sinks, words: { query: words[0], key: words[1] } };
}

const wordsOf = (side) => chosen.words[side];
const sizeOf = (side) => wordsOf(side).length;

// The share that a query gives a key.
const shareOf = (query, key) => chosen.map.cells[query * chosen.map.columns + key];

// What a query gives to keys, or what queries give to a key: places with their shares.
function sharesOf(side, place) {
  const share = side === "query" ? (key) => shareOf(place, key) : (query) => shareOf(query, place);
  return wordsOf(side === "query" ? "key" : "query").map((_, at) => ({ place: at, share: share(at) }));
}

const largestOf = (entries) => entries.reduce((best, entry) => (entry.share > (best?.share ?? 0) ? entry : best), null);
const strongestKey = (query) => largestOf(sharesOf("query", query))?.place ?? 0;
