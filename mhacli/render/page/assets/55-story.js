// The chosen cell's story: dot product, score, weight, and what it adds to the head's output.

const SHOWN_NUMBERS = 6, CLOSE_ENOUGH = 2e-3;

function drawStory() {
  const { query, key } = choice, weight = weightAt(query, key);
  reason = "";
  const title = make("h3", {}, "This cell, step by step: ", ...namedPair([query], [key]));
  const isKnown = !chosen.isOfBlocks && weight !== undefined;
  const steps = isKnown ? explained(query, key, weight) : unexplained();
  byId("story").replaceChildren(title, steps);
  // A frame that is higher than the window sticks by its lower end, so that the story can be read.
  const frame = byId("chosen");
  frame.style.setProperty("--stick", `${Math.min(12, innerHeight - frame.offsetHeight - 12)}px`);
}

function unexplained() {
  const { block } = chosen.map;
  const cell = `A cell of this map stands for ${block} × ${block} tokens`;
  return make("p", { class: "note" }, `${cell}, and this single cell is not in the page.`);
}

function explained(query, key, weight) {
  const steps = weight === MASKED ? stepsOfMasked(query, key) : stepsOf(query, key, weight);
  return make("ol", {}, ...steps.map((text) => make("li", {}, ...marked(text))));
}

// Why a number is not shown: the record does not have it, or the page has no room. The reason of
// the number before is not repeated.
let reason = "";
function notHere(name, what) {
  const before = reason;
  reason = layerNow().absent[name] ?? "there was no room in this page; --full puts it in";
  return `${what} is not shown${reason === before ? "" : `: ${reason}`}.`;
}

const layerNow = () => RECORD.layers[HEADS[choice.head].layer];
const numberAt = (name, query, key) => chosen.arrays[name]?.[query * wordsOf("key").length + key];

function stepsOfMasked(query, key) {
  const qk = numberAt("qk", query, key);
  return [
    qk === undefined ? `dot product: ${notHere("qk", "it")}` : `dot product = ${numberText(qk)}.`,
    "This key is masked for this query: the {score} is −∞.",
    "The {weight} is exp(−∞) = 0, exactly.",
    "It adds nothing to the {head output}.",
  ];
}

function stepsOf(query, key, weight) {
  const qk = numberAt("qk", query, key), score = numberAt("scores", query, key);
  const product = `{query} vector · {key} vector`;
  return [
    qk === undefined
      ? `${product}: ${notHere("qk", "the dot product")}`
      : `${product} = ${numberText(qk)}: their dot product, how well the two match.`,
    scoreText(qk, score),
    weightText(query, key, weight),
    outputText(query, key, weight),
  ];
}

// The score as it follows from the dot product: scale, softcap and what is added, in their order.
function scoreText(qk, score) {
  if (score === undefined) return `{score}: ${notHere("scores", "it")}`;
  const { scale, softcap, bias } = layerNow();
  if (qk === undefined || scale === null) return `{score} = ${numberText(score)}.`;
  const scaled = scale * qk;
  const capped = softcap === null ? scaled : softcap * Math.tanh(scaled / softcap);
  const parts = [`${numberText(scale)} · ${numberText(qk)}`];
  if (softcap !== null) parts.push(`${numberText(scaled)}, by the {softcap} ${numberText(capped)}`);
  const added = score - capped, isRounding = Math.abs(added) <= 1e-6 * Math.max(1, Math.abs(score));
  const biased = bias ? `, and with a bias of ${numberText(isRounding ? 0 : added)}` : "";
  return `{score} = ${parts.join(" = ")}${biased} = ${numberText(score)}.`;
}

// The softmax of the query's row, as it follows from the scores, beside the weight in the record.
function weightText(query, key, weight) {
  const row = weightsOf("query", query).filter((entry) => entry.weight !== MASKED);
  const stored = Number.isNaN(weight) ? "not a number" : exactText(weight);
  if (!chosen.arrays.scores)
    return `{weight} = softmax of the row = ${stored}. ${notHere("scores", "The row of scores")}`;
  const scores = row.map((entry) => numberAt("scores", query, entry.place));
  const top = Math.max(...scores);
  const sum = scores.reduce((total, score) => total + Math.exp(score - top), 0);
  const score = numberAt("scores", query, key), rest = 1 - (chosen.map.learned?.[query] ?? 0);
  const difference = `${numberText(score)} − ${top < 0 ? `(${numberText(top)})` : numberText(top)}`;
  const logit = rest < 1 ? ` · ${numberText(rest)}, what the {sink logit} leaves,` : "";
  const computed = (Math.exp(score - top) / sum) * rest;
  const isOther = Math.abs(computed - weight) > CLOSE_ENOUGH;
  const stands = isOther ? ` gives ${numberText(computed)}; stored is ${stored}` : ` = ${stored}`;
  const place = row.filter((entry) => entry.weight > weight).length + 1;
  return `{weight} = exp(${difference}) ÷ ${numberText(sum)}${logit}${stands}, `
    + `where ${numberText(top)} is the largest score of the row and ${numberText(sum)} the sum of `
    + `exp(score − largest) over the ${row.length} keys that this query sees. `
    + `It is number ${place} of the row; `
    + `each key would get ${numberText(1 / row.length)} if attention were uniform.`;
}

// `[0.12, −0.3, … 10 more]`
function vectorText(numbers) {
  const shown = [...numbers.slice(0, SHOWN_NUMBERS)].map(numberText);
  const more = numbers.length - SHOWN_NUMBERS;
  return `[${shown.join(", ")}${more > 0 ? `, … ${more} more` : ""}]`;
}

// The row of an array that belongs to a token.
function vectorOf(array, side, place) {
  const length = array.length / wordsOf(side).length;
  return array.subarray(place * length, (place + 1) * length);
}

function outputText(query, key, weight) {
  const { v, z } = chosen.arrays, { dropout } = layerNow(), product = "weight · {value}";
  const sum = z
    ? `The sum over all keys is z = ${vectorText(vectorOf(z, "query", query))}.`
    : notHere("z", "The sum over all keys, z,");
  if (!v) return `${product} is added to the {head output}. ${notHere("v", "The value")} ${sum}`;
  if (dropout > 0)
    return `Dropout with probability ${dropout} changes the weight before it is used. ${sum}`;
  const values = vectorOf(v, "key", key);
  const added = vectorText(values.map((number) => weight * number));
  const computed = `${product} = ${numberText(weight)} · ${vectorText(values)} = ${added}`;
  return `${computed}, which is added to the {head output}. ${sum}`;
}
