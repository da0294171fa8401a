// The chosen head and cell in words.

const MOST_SINKS = 4;

// `query 5 “mat”`, or `queries 16–23`.
function named(side, place) {
  const word = wordsOf(side)[place];
  if (chosen.isOfBlocks) return [`${side === "query" ? "queries" : "keys"} ${word}`];
  return [`${side} ${place} “`, tokenElement(word), "”"];
}

// A weight as it stands in the record; a mean in as many digits as say something.
function valueParts(share, isMean = false) {
  if (Number.isNaN(share)) return [make("strong", { class: "bad" }, "not a number")];
  if (isMean) return [make("strong", {}, shareText(share, share < 0.01 ? 5 : 3))];
  return [make("strong", {}, exactText(share)), RECORD.bits === 64 ? " rounded to 32 bits" : " exact"];
}

// Two lines of a fixed height, so that the matrix stays where it is under the pointer.
function drawReadout() {
  const cell = cellInView();
  const [names, reading] = cell ? aboutCell(cell) : aboutPlace(pointed);
  byId("readout").replaceChildren(make("span", { class: "names" }, ...names, ": "), make("span", { class: "reading" }, ...reading));
}

function aboutPlace({ side, place }) {
  const strongest = largestOf(sharesOf(side, place)), name = named(side, place);
  if (!strongest) return [name, [side === "query" ? "sees no key" : "no query sees it"]];
  const [to, verb] = side === "query" ? ["key", " gives most to "] : ["query", " is given most by "];
  return [[...name, verb, ...named(to, strongest.place)], valueParts(strongest.share, chosen.isOfBlocks)];
}

function aboutCell({ row, column }) {
  const { map, isOfBlocks } = chosen, share = shareOf(row, column), left = cellsOf(map)[row * map.columns + column];
  const names = [...named("query", row), " → ", ...named("key", column)];
  if (share === FORBIDDEN) return [names, [make("strong", {}, "masked")]];
  const reading = valueParts(share, isOfBlocks);
  if (isOfBlocks) reading.push(" of a query’s attention, the mean of this block");
  if (chosen.sinks.includes(column)) reading.push(make("span", { class: "sink" }, isOfBlocks ? " · holds a sink" : " · a sink"));
  if (left === TAKEN) reading.push(make("span", { class: "sink" }, ", taken out"));
  else if (strips().length && choice.hideSinks) reading.push(` · ${shareText(left, 3)} of what is left beside sinks`);
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
  if (map.block > 1) parts.push(make("span", {}, `a cell is ${map.block} × ${map.block} tokens`));
  if (map.masked) parts.push(entry("swatch masked", "", "masked"));
  if (map.missing) parts.push(entry("swatch lost", "", "not a number"));
  if (strips().length) parts.push(entry("ramp of-sinks", "beside the plot: 0", "1"));
  const taken = choice.hideSinks ? ", taken out" : "";
  if (map.about) parts.push(make("span", { class: "sink" }, "▾ ", ...marked("{sinks}"), ` of this head${taken}: `, ...namesOfSinks(map), map.about));
  else if (choice.hideSinks) parts.push(make("span", { class: "sink" }, "no sink here, none taken out"));
  byId("legend").replaceChildren(...parts);
}
