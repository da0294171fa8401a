// The chosen head and cell in words.

const MOST_SINKS = 4;

// `query 5 “mat”`, or `queries 16–23`.
function named(side, place, last = place) {
  const word = wordsOf(side)[place], plural = side === "query" ? "queries" : "keys";
  if (last > place) return [`${plural} ${rangeText(place, last)}`];
  if (chosen.isOfBlocks) return [`${plural} ${word}`];
  return [`${side} ${place} “`, tokenElement(word), "”"];
}

const namedPair = (queries, keys) =>
  [...named("query", ...queries), " → ", ...named("key", ...keys)];

// A weight as it stands in the record, or in the three digits that the page has of it, as the
// legend says; a mean in as many as say something.
function valueParts(weight, isMean = false) {
  if (Number.isNaN(weight)) return [make("strong", { class: "bad" }, "not a number")];
  if (isMean) return [make("strong", {}, shortWeight(weight, weight < 0.01 ? 5 : 3))];
  return [make("strong", {}, exactText(weight)), chosen.map.keys ? "" : ` ${RECORD.precision}`];
}

// Two lines of a fixed height, so that the matrix stays where it is under the pointer.
function drawReadout() {
  const cell = cellInView();
  const [names, reading] = cell ? aboutCell(cell) : aboutPlace(pointed);
  byId("readout").replaceChildren(span("names", ...names, ": "), span("reading", ...reading));
}

function aboutPlace({ side, place }) {
  const found = largestOf(weightsOf(side, place)), name = named(side, place);
  const [to, verb, none] = side === "query" ? ["key", " gives most to ", "sees no key"] : givenTo();
  if (!found) return [name, [none]];
  return [[...name, verb, ...named(to, found.place)], valueParts(found.weight, chosen.isOfBlocks)];
}

// Where the page has only strongest keys, a key is known of the queries that have it among theirs.
function givenTo() {
  if (!chosen.map.keys) return ["query", " is given most by ", "no query sees it"];
  const verb = ", where it is among the strongest keys, is given most by ";
  return ["query", verb, "is among no query’s strongest keys"];
}

function aboutCell({ row, column }) {
  const { map } = chosen, isMean = map.block > 1, at = row * map.columns + column;
  const weight = map.cells[at], left = cellsOf(map)[at];
  const names = namedPair(placesOf("query", row), placesOf("key", column));
  if (weight === MASKED) return [names, [make("strong", {}, "masked")]];
  const reading = valueParts(weight, isMean);
  if (isMean) reading.push(" is the mean of this block");
  const strongest = map.keys && strongestIn({ row, column });
  if (strongest?.weight) {
    const pair = namedPair([strongest.query], [strongest.key]);
    reading.push(" · strongest: ", ...pair, " ", ...valueParts(strongest.weight));
  }
  const isSink = chosen.sinks.some((place) => cellOf(place) === column);
  if (isSink) reading.push(span("sink", isMean ? " · holds a sink" : " · a sink"));
  if (left === TAKEN) reading.push(span("sink", ", taken out"));
  else if (strips().length && choice.hideSinks)
    reading.push(` · ${shortWeight(left, 3)} of what is left beside sinks`);
  return [names, reading];
}

function drawTitle() {
  const { label: name, about, type, layer } = HEADS[choice.head];
  byId("chosen-title").textContent = name;
  const facts = type ? make("span", { class: "term", title: RECORD.terms[type] }, about) : about;
  byId("facts").replaceChildren(facts);
  if (!RECORD.layers[layer].verified) byId("facts").append(span("bad", " · NOT verified"));
  // Not `disabled`, which would take the focus away from whoever pressed the last one.
  byId("previous").setAttribute("aria-disabled", choice.head === 0);
  byId("next").setAttribute("aria-disabled", choice.head === HEADS.length - 1);
  const sinks = choice.hideSinks ? ", sinks taken out" : "";
  const words = `${name}: rows of queries, columns of keys, ${choice.scale} scale${sinks}`;
  byId("plot").setAttribute("aria-label", words);
}

// The first sinks of a map as tokens with their places.
function namesOfSinks({ sinks }) {
  const text = RECORD.texts[layerNow().keys[choice.sequence]], first = sinks.slice(0, MOST_SINKS);
  const names = first.flatMap((place) => [`${place} “`, tokenElement(text[place]), "” "]);
  return [...names, sinks.length > MOST_SINKS ? `and ${sinks.length - MOST_SINKS} more ` : ""];
}

// What the colours mean, and which keys are sinks of this head.
function drawLegend() {
  const { map } = chosen, [least, most] = scaleNow()[choice.scale];
  const entry = (kind, left, right = "") => make("span", {}, left, " ", span(kind), " ", right);
  const parts = [entry("ramp", least, most)];
  const add = (...words) => parts.push(make("span", {}, ...words));
  add(...marked(`{attention weight} · ${choice.scale}, one scale for all heads`));
  if (map.block > 1) add(`a cell is the mean of ${map.block} × ${map.block} tokens`);
  const kept = `the ${RECORD.n_keys} strongest keys of every query, their weights to 3 digits`;
  if (map.keys) add(`the page has ${kept}`);
  if (map.masked) parts.push(entry("swatch masked", "", "masked"));
  if (map.missing) parts.push(entry("swatch lost", "", "not a number"));
  if (strips().length) parts.push(entry("ramp of-sinks", "beside the plot: 0", "1"));
  const taken = choice.hideSinks ? ", taken out" : "";
  const sinks = [...marked("{sinks}"), ` of this head${taken}: `, ...namesOfSinks(map), map.about];
  if (map.about) parts.push(span("sink", "▾ ", ...sinks));
  else if (choice.hideSinks) parts.push(span("sink", "no sink here, none taken out"));
  byId("legend").replaceChildren(...parts);
}
