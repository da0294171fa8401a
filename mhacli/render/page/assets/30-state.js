// The selection. Whatever changes it draws everything anew; the pointer draws what depends on it.

// `query` and `key` are places, -1: to be chosen from the map. `side` says whose lines are drawn.
const choice = {
  head: RECORD.begin, sequence: 0, query: -1, key: -1, side: "query",
  scale: RECORD.scale, hideSinks: RECORD.hide_sinks,
};
// The map of the chosen head, what is known beside it, and the words of its axes.
const chosen = { head: -1, sequence: -1, map: null, words: { query: [], key: [] } };
// Where the pointer rests: a place {side, place}, or a cell {side: "cell", row, column}.
let pointed = null;
let zoom = 1;

let turns = 0;
async function choose(changes) {
  Object.assign(choice, changes);
  const { head, sequence } = choice, turn = ++turns;
  if (chosen.head !== head || chosen.sequence !== sequence) {
    const loads = [loadMap(head), loadStrongest(head), loadArrays(head)];
    const [map, strongest, arrays] = await Promise.all(loads);
    if (turn !== turns) return;
    if (map.rows !== chosen.map?.rows || map.columns !== chosen.map?.columns) zoom = 1;
    Object.assign(map, strongest);
    Object.assign(chosen, { head, sequence, map, arrays }, readTexts(map));
    pointed = null;
  }
  stayInside();
  drawAll();
}

// At first the last query is chosen, which has most keys to choose from, and its strongest key.
function stayInside() {
  const { query, key } = chosen.words;
  if (!(choice.query in query)) choice.query = query.length - 1;
  if (!(choice.key in key)) choice.key = strongestKey(choice.query);
}

function point(next) {
  if (JSON.stringify(next) === JSON.stringify(pointed)) return;
  pointed = next;
  requestAnimationFrame(() => {
    if (pointed === next && chosen.map) drawPointed();
  });
}

const stepHead = (by) => choose({ head: between(0, HEADS.length - 1, choice.head + by) });
// A token that is kept: its lines stay, and a query's strongest key is the cell that is explained.
const keepToken = (side, place) =>
  choose({ side, [side]: place, ...(side === "query" && { key: strongestKey(place) }) });

// The address, so that a colleague opens the same view.
function writeAddress() {
  const { query, key, side, scale } = choice, sinks = choice.hideSinks ? "hidden" : "shown";
  const { head } = HEADS[choice.head], sequence = RECORD.numbers[choice.sequence];
  const parts = { layer: layerNow().name, head, sequence, query, key, side, scale, sinks };
  if (!parts.layer) delete parts.layer;
  const next = `#${new URLSearchParams(parts)}`;
  try {
    if (next !== location.hash) history.replaceState(null, "", next);
  } catch {
    // A frame without an address of its own: the view works, it just cannot be linked to.
  }
}

// The parts of the address that this record has; others are ignored.
function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (/^\d{1,9}$/.test(parts.get(name)) ? Number(parts.get(name)) : -1);
  const layerOf = (head) => RECORD.layers[head.layer].name;
  const isMeant = (one) =>
    one.head === number("head") && layerOf(one) === (parts.get("layer") ?? layerOf(one));
  const head = HEADS.findIndex(isMeant), sequence = RECORD.numbers.indexOf(number("sequence"));
  return {
    head: head < 0 ? choice.head : head,
    sequence: sequence < 0 ? choice.sequence : sequence,
    query: number("query"),
    key: number("key"),
    side: parts.get("side") === "key" ? "key" : "query",
    scale: ["linear", "log"].includes(parts.get("scale")) ? parts.get("scale") : choice.scale,
    hideSinks: parts.has("sinks") ? parts.get("sinks") === "hidden" : choice.hideSinks,
  };
}
