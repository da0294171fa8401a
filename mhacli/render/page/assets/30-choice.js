// What is looked at, and how it is kept in the address, so that a colleague opens the same view.

const HEADS = RECORD.heads;
const SCALES = ["linear", "log"];
const THEMES = ["auto", "dark", "light"];

// `query` and `key` are places in the text; `side` says whose lines are drawn. -1: to be chosen from the map.
const choice = {
  head: RECORD.begin, sequence: 0, query: -1, key: -1, side: "query",
  scale: RECORD.scale.kind, hideSinks: RECORD.hide_sinks,
};

// The map of the chosen head, the strongest keys of its queries, and the words of its axes.
const chosen = { map: null, strongest: null, parts: {}, words: { query: [], key: [] } };

// What the pointer or the focus rests on, until it leaves: a place {side, place}, or a cell {side, row, column}.
let pointed = null;

const mapIndex = (head) => head * RECORD.sequences + choice.sequence;
const layerName = (layer) => RECORD.layers[layer].label.replace(/\blayer /, "").replace(/ /g, "-");

function fragment() {
  const { layer, head } = HEADS[choice.head];
  const parts = { layer: layerName(layer), head, sequence: RECORD.numbers[choice.sequence] };
  if (!parts.layer) delete parts.layer;
  if (RECORD.sequences === 1) delete parts.sequence;
  Object.assign(parts, { query: choice.query, key: choice.key });
  if (choice.side === "key") parts.side = "key";
  Object.assign(parts, { scale: choice.scale, sinks: choice.hideSinks ? "hidden" : "shown" });
  return "#" + new URLSearchParams(parts);
}

// The parts of an address that this record has; others are let go.
function readFragment(text) {
  const parts = new URLSearchParams(text.replace(/^#/, ""));
  const found = {};
  const number = (name) => (/^\d{1,9}$/.test(parts.get(name) ?? "") ? Number(parts.get(name)) : -1);
  const head = HEADS.findIndex(
    (one) => one.head === number("head") && (!parts.has("layer") || layerName(one.layer) === parts.get("layer")),
  );
  if (head >= 0) found.head = head;
  const sequence = RECORD.numbers.indexOf(number("sequence"));
  if (sequence >= 0) found.sequence = sequence;
  for (const side of ["query", "key"]) if (number(side) >= 0) found[side] = number(side);
  if (parts.has("query") || parts.has("key")) found.side = parts.get("side") === "key" ? "key" : "query";
  if (SCALES.includes(parts.get("scale"))) found.scale = parts.get("scale");
  if (parts.has("sinks")) found.hideSinks = parts.get("sinks") === "hidden";
  return found;
}

function writeFragment() {
  const next = fragment();
  if (next === location.hash) return;
  try {
    history.replaceState(null, "", next);
  } catch {
    // A frame without an address of its own: the view works, it just cannot be linked to.
  }
}

// Another head, sequence, cell or scale. What the pointer rests on stays until it moves.
let turns = 0;
async function choose(changes) {
  Object.assign(choice, changes);
  const turn = ++turns, index = mapIndex(choice.head);
  if (chosen.map === null || chosen.map.index !== index) {
    const [map, details] = await Promise.all([loadMap(index), loadDetails(index)]);
    if (turn !== turns) return;
    const layer = RECORD.layers[HEADS[choice.head].layer];
    const isOtherShape = !chosen.map || ["rows", "columns", "block"].some((name) => chosen.map[name] !== map[name]);
    const texts = [layer.queries, layer.keys].map((family) => RECORD.texts[family[choice.sequence]]);
    Object.assign(chosen, { map, ...details, ...readTexts(map, details.strongest, texts) });
    pointed = null;
    if (isOtherShape) matrix.view = null;
  }
  stayInside();
  drawAll();
}

// The first look is at the last query, which has most to choose from; and a query's strongest key.
function stayInside() {
  const { query, key } = chosen.words;
  if (choice.query < 0 || choice.query >= query.length) choice.query = query.length - 1;
  if (choice.key < 0 || choice.key >= key.length) choice.key = strongestKey(choice.query);
}

function point(next) {
  pointed = next;
  requestAnimationFrame(() => {
    if (pointed !== next || chosen.map === null) return;
    drawCursor();
    drawReadout();
    drawTokens();
  });
}
