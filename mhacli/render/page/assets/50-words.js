// The chosen head and cell in words.

const MOST_SINKS = 4;

// `query 5 “mat”`, or `queries 16–23`.
function named(side, place, last = place) {
  const word = wordsOf(side)[place], plural = side === "query" ? "queries" : "keys";
  if (last > place) return [`${plural} ${rangeText(place, last)}`];
  if (chosen.isOfBlocks) return [`${plural} ${word}`];
  return [`${side} ${place} “`, tokenElement(word), "”"];
}

// A weight as it stands in the record, or in the three digits that the page has of it, as the legend says; a mean in as many as
// say something.
function valueParts(weight, isMean = false) {
  if (Number.isNaN(weight)) return [make("strong", { class: "bad" }, "not a number")];
  if (isMean) return [make("strong", {}, shortWeight(weight, weight < 0.01 ? 5 : 3))];
  return [make("strong", {}, exactText(weight)), chosen.map.keys ? "" : ` ${RECORD.precision}`];
}

// Two lines of a fixed height, so that the matrix stays where it is under the pointer.
function drawReadout() {
  const cell = cellInView();
  const [names, reading] = cell ? aboutCell(cell) : aboutPlace(pointed);
  byId("readout").replaceChildren(make("span", { class: "names" }, ...names, ": "), make("span", { class: "reading" }, ...reading));
}

function aboutPlace({ side, place }) {
  const strongest = largestOf(weightsOf(side, place)), name = named(side, place);
  const [to, verb, none] = side === "query" ? ["key", " gives most to ", "sees no key"] : givenTo();
  if (!strongest) return [name, [none]];
  return [[...name, verb, ...named(to, strongest.place)], valueParts(strongest.weight, chosen.isOfBlocks)];
}

// Where the page has the strongest keys of queries alone, a key is known of the queries that have it among theirs.
function givenTo() {
  if (chosen.map.keys) return ["query", ", where it is among the strongest keys, is given most by ", "is among no query’s strongest keys"];
  return ["query", " is given most by ", "no query sees it"];
}

function aboutCell({ row, column }) {
  const { map } = chosen, at = row * map.columns + column, weight = map.cells[at], left = cellsOf(map)[at], isMean = map.block > 1;
  const names = [...named("query", ...placesOf("query", row)), " → ", ...named("key", ...placesOf("key", column))];
  if (weight === MASKED) return [names, [make("strong", {}, "masked")]];
  const reading = valueParts(weight, isMean);
  if (isMean) reading.push(" is the mean of this block");
  const strongest = map.keys && strongestIn({ row, column });
  if (strongest?.weight) {
    const { query, key } = strongest;
    reading.push(" · strongest: ", ...named("query", query), " → ", ...named("key", key), " ", ...valueParts(strongest.weight));
  }
  const isSink = chosen.sinks.some((place) => cellOf(place) === column);
  if (isSink) reading.push(make("span", { class: "sink" }, isMean ? " · holds a sink" : " · a sink"));
  if (left === TAKEN) reading.push(make("span", { class: "sink" }, ", taken out"));
  else if (strips().length && choice.hideSinks) reading.push(` · ${shortWeight(left, 3)} of what is left beside sinks`);
  return [names, reading];
}

function drawTitle() {
  const { label: name, about, type, layer } = HEADS[choice.head];
  byId("chosen-title").textContent = name;
  byId("facts").replaceChildren(type ? make("span", { class: "term", title: RECORD.terms[type] }, about) : about);
  if (!RECORD.layers[layer].verified) byId("facts").append(make("span", { class: "bad" }, " · NOT verified"));
  // Not `disabled`, which would take the focus away from whoever pressed the last one.
  byId("previous").setAttribute("aria-disabled", choice.head === 0);
  byId("next").setAttribute("aria-disabled", choice.head === HEADS.length - 1);
  const sinks = choice.hideSinks ? ", sinks taken out" : "";
  byId("plot").setAttribute("aria-label", `${name}: rows of queries, columns of keys, ${choice.scale} scale${sinks}`);
}

// The first sinks of a map as tokens with their places.
function namesOfSinks({ sinks }) {
  const text = RECORD.texts[RECORD.layers[HEADS[choice.head].layer].keys[choice.sequence]];
  const names = sinks.slice(0, MOST_SINKS).flatMap((place) => [`${place} “`, tokenElement(text[place]), "” "]);
  return [...names, sinks.length > MOST_SINKS ? `and ${sinks.length - MOST_SINKS} more ` : ""];
}

// What the colours mean, and which keys are sinks of this head.
function drawLegend() {
  const { map } = chosen, [least, most] = scaleNow()[choice.scale];
  const entry = (kind, before, after = "") => make("span", {}, before, " ", make("span", { class: kind }), " ", after);
  const parts = [
    entry("ramp", least, most),
    make("span", {}, ...marked(`{attention weight} · ${choice.scale}, one scale for all heads`)),
  ];
  if (map.block > 1) parts.push(make("span", {}, `a cell is the mean of ${map.block} × ${map.block} tokens`));
  if (map.keys) parts.push(make("span", {}, `the page has the ${RECORD.n_keys} strongest keys of every query, their weights to 3 digits`));
  if (map.masked) parts.push(entry("swatch masked", "", "masked"));
  if (map.missing) parts.push(entry("swatch lost", "", "not a number"));
  if (strips().length) parts.push(entry("ramp of-sinks", "beside the plot: 0", "1"));
  const taken = choice.hideSinks ? ", taken out" : "";
  if (map.about) parts.push(make("span", { class: "sink" }, "▾ ", ...marked("{sinks}"), ` of this head${taken}: `, ...namesOfSinks(map), map.about));
  else if (choice.hideSinks) parts.push(make("span", { class: "sink" }, "no sink here, none taken out"));
  byId("legend").replaceChildren(...parts);
}
