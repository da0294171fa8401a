// The two texts side by side, and what flows between them.

// Of texts with more tokens than this those around the chosen one are listed, and the strongest.
const MOST_LISTED = 32, LISTED = 22, STRONGEST = 16;
const LISTS = { query: byId("queries"), key: byId("keys") };

function listenToTokens() {
  for (const [side, list] of Object.entries(LISTS)) {
    const placeOf = (event) => event.target.closest("[data-place]")?.dataset.place;
    const follow = (event) => placeOf(event) && point({ side, place: Number(placeOf(event)) });
    list.addEventListener("pointerover", follow);
    list.addEventListener("pointerleave", () => point(null));
    list.addEventListener("click", (event) => {
      if (placeOf(event) && !isTextSelected()) keepToken(side, Number(placeOf(event)));
    });
    list.addEventListener("keydown", (event) => pressOnTokens(event, side));
  }
}

function pressOnTokens(event, side) {
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const other = { ArrowLeft: "query", ArrowRight: "key" }[event.key];
  if (!by && !other) return;
  event.preventDefault();
  pointed = null;
  if (by) keepToken(side, between(0, wordsOf(side).length - 1, choice[side] + by));
  else LISTS[other].focus();
}

// The query or key whose lines are drawn.
function focusOfTokens() {
  if (pointed?.side === "cell") return { side: "query", place: strongestIn(pointed).query };
  return pointed ?? { side: choice.side, place: choice[choice.side] };
}

function drawTokens() {
  const focus = focusOfTokens(), { side } = focus, other = otherOf(side);
  const entries = weightsOf(side, focus.place);
  const open = entries.filter((entry) => entry.weight !== MASKED);
  const isTaken = (entry) => choice.hideSinks && isOfSink(focus, entry);
  const largest = largestOf(open.filter((entry) => !isTaken(entry)))?.weight ?? 0;
  // The list under the pointer stays as it is.
  if (pointed?.side !== side) fillList(side, listed(side, focus.place, []));
  fillList(other, listed(other, focus.place, open));
  markPlaces(side, new Map(), 1, focus);
  const marks = entries.map((entry) => [entry.place, { ...entry, isTaken: isTaken(entry) }]);
  markPlaces(other, new Map(marks), largest);
  drawLines(focus, LISTS[other], open, largest);
  tellTokens(focus, open);
}

function isOfSink(focus, entry) {
  return chosen.sinks.includes(focus.side === "query" ? entry.place : focus.place);
}

// All places, or of many the strongest and the nearest, in the order of the text.
function listed(side, near, entries) {
  const places = range(0, wordsOf(side).length);
  if (places.length <= MOST_LISTED) return places;
  const sorted = entries.toSorted((a, b) => b.weight - a.weight);
  const strongest = sorted.slice(0, STRONGEST).map((entry) => entry.place);
  const nearest = places.toSorted((a, b) => Math.abs(a - near) - Math.abs(b - near));
  return [...new Set([...strongest, ...nearest])].slice(0, LISTED).sort((a, b) => a - b);
}

// New elements only where other places are listed, so that a word can be selected.
function fillList(side, places) {
  if (!isStale(LISTS[side], choice.sequence, chosen.isOfBlocks, ...places)) return;
  const rows = places.map((place, i) => {
    const word = wordsOf(side)[place], kind = i && places[i - 1] < place - 1 ? "after-gap" : "";
    const [number, words] = chosen.isOfBlocks ? [word, ""] : [place, tokenElement(word)];
    const parts = [span("place", number), span("words", words), span("weight")];
    const attributes = { id: `${side}-${place}`, title: word, class: kind };
    return make("li", { role: "option", "data-place": place, ...attributes }, ...parts);
  });
  LISTS[side].replaceChildren(...rows);
}

// The weight of every place as a bar and a number; of the places in focus none.
function markPlaces(side, weights, largest, focus = {}) {
  LISTS[side].setAttribute("aria-activedescendant", `${side}-${choice[side]}`);
  const digits = largest < 0.1 ? 3 : 2;
  for (const row of LISTS[side].children) {
    const place = Number(row.dataset.place), { weight, isTaken } = weights.get(place) ?? {};
    const part = weight > 0 && !isTaken ? Math.min(1, weight / largest) : 0;
    row.style.setProperty("--part", `${(100 * part).toFixed(1)}%`);
    row.classList.toggle("current", place === focus.place);
    row.classList.toggle("of-sink", side === "key" && chosen.sinks.includes(place));
    row.setAttribute("aria-selected", place === choice[side] && side === choice.side);
    const number = weight === undefined ? "" : shortWeight(weight, digits);
    row.lastChild.textContent = weight === MASKED ? "–" : number;
  }
}

// A line's width follows the weight, the largest of this picture being 9 pixels.
function drawLines(focus, list, open, largest) {
  const svg = byId("lines"), width = svg.clientWidth, middle = width / 2;
  const rowOf = (side, place) => LISTS[side].querySelector(`[data-place="${place}"]`);
  const heightOf = (row) => row.offsetTop - row.parentElement.offsetTop + row.offsetHeight / 2;
  const other = otherOf(focus.side), own = rowOf(focus.side, focus.place);
  const endOf = (entry) => rowOf(other, entry.place);
  const drawn = open.filter((entry) => own && largest && entry.weight > 0 && endOf(entry));
  const lines = drawn.map((entry) => {
    const ends = [own, endOf(entry)].map(heightOf);
    const [left, right] = focus.side === "query" ? ends : ends.reverse();
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("d", `M0 ${left}C${middle} ${left} ${middle} ${right} ${width} ${right}`);
    line.style.setProperty("--strength", Math.min(1, entry.weight / largest));
    line.classList.toggle("of-sink", isOfSink(focus, entry));
    line.classList.toggle("taken", choice.hideSinks && isOfSink(focus, entry));
    return line;
  });
  svg.replaceChildren(...lines);
}

function tellTokens({ side, place }, open) {
  const [what, known] = side === "query"
    ? ["what it gives to keys", `its ${open.length} strongest`]
    : ["what queries give to it", "where it is among their strongest keys"];
  const parts = [...named(side, place), `: ${what}`];
  if (chosen.map.keys) parts.push(`, ${known}`);
  if (chosen.isOfBlocks) parts.push(", in means of blocks");
  parts.push(". Widths follow attention weights, from the largest down.");
  if (choice.hideSinks)
    parts.push(" Lines to what is taken out are thin and broken; weights are of all attention.");
  byId("tokens-note").replaceChildren(...parts);
}
