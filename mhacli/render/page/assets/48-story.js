// The story of the chosen cell: from the dot product to the score, the weight, and what it adds to the head's output.

const SHOWN_NUMBERS = 6;
const CLOSE_ENOUGH = 2e-3;

// A word whose explanation shows where the pointer rests on it.
const explained = (words, name = words) => make("span", { class: "term", title: RECORD.terms[name] }, words);

// A number behind a minus sign, in brackets where it is negative.
const subtracted = (number) => (number < 0 ? `(${digits(number)})` : digits(number));

const digits = (number) => (Number.isFinite(number) ? String(Number(number.toPrecision(4))) : number < 0 ? "−∞" : "not a number").replace("-", "−");

// `[0.12, −0.3, … 10 more]`
function vectorText(numbers) {
  const more = numbers.length - SHOWN_NUMBERS;
  return `[${[...numbers.slice(0, SHOWN_NUMBERS)].map(digits).join(", ")}${more > 0 ? `, … ${more} more` : ""}]`;
}

function drawStory() {
  fillStory();
  // Where the frame is higher than the window it sticks by its lower end, so that the story can be read.
  const frame = byId("chosen");
  frame.style.setProperty("--stick", `${Math.min(12, innerHeight - frame.offsetHeight - 12)}px`);
}

function fillStory() {
  const { query, key } = choice, { map } = chosen;
  const title = make("h3", {}, "This cell, step by step: ", ...namedPlace("query", query), " → ", ...namedPlace("key", key));
  const known = shareOf(query, key);
  if (known === undefined || chosen.isOfBlocks) {
    const why = `A cell of this map stands for ${map.block} × ${map.block} tokens, and single cells of this query are not in the page.`;
    byId("story").replaceChildren(title, make("p", { class: "note" }, why));
    return;
  }
  const steps = known === FORBIDDEN ? storyOfMasked(query, key) : storyOf(query, key, known);
  byId("story").replaceChildren(title, make("ol", {}, ...steps.map((parts) => make("li", {}, ...parts))));
}

// Why a number is not shown: the record does not have it, or the page has no room.
function notHere(name, what) {
  const why = RECORD.layers[HEADS[choice.head].layer].absent[name] ?? "there was no room in this page; --full puts it in";
  return make("span", { class: "missing-part" }, `${what} is not shown: `, ...withOptions(`${why}.`));
}

// Text in which each option stands on one line with its value, so that it can be read and copied.
function withOptions(text) {
  return text.split(/(--[a-z-]+(?: [a-z_]+(?:,[a-z_]+)+)?)/).map((part, i) => (i % 2 ? make("code", {}, part) : part));
}

const at = (name, query, key) => chosen.parts[name]?.[query * wordsOf("key").length + key];

function storyOfMasked(query, key) {
  const qk = at("qk", query, key);
  return [
    [explained("q · k", "attention scores"), " ", ...(qk === undefined ? [notHere("qk", "the dot product")] : [`= ${digits(qk)}.`])],
    ["This key is masked for this query: the ", explained("score", "attention scores"), " is −∞."],
    ["The ", explained("weight", "attention weight"), " is exp(−∞) = 0, exactly."],
    ["It adds nothing to the ", explained("head output"), "."],
  ];
}

function storyOf(query, key, known) {
  return [productStep(query, key), scoreStep(query, key), weightStep(query, key, known), outputStep(query, key, known)];
}

function productStep(query, key) {
  const qk = at("qk", query, key), names = [explained("query", "query"), " vector · ", explained("key", "key"), " vector"];
  if (qk === undefined) return [...names, ": ", notHere("qk", "the dot product")];
  return [...names, ` = ${digits(qk)}: their dot product, how well the two match.`];
}

// Numbers of 32 bits that differ by no more than their rounding.
const isNear = (a, b) => Math.abs(a - b) <= 1e-6 * Math.max(1, Math.abs(a), Math.abs(b));

// Scale, softcap and what is added, in their order.
function scoreStep(query, key) {
  const score = at("scores", query, key), qk = at("qk", query, key), name = explained("score", "attention scores");
  const { scale, softcap, bias } = RECORD.layers[HEADS[choice.head].layer];
  if (score === undefined) return [name, ": ", notHere("scores", "the score")];
  if (qk === undefined || scale === null) return [name, ` = ${digits(score)}.`];
  const scaled = scale * qk, capped = softcap === null ? scaled : softcap * Math.tanh(scaled / softcap);
  const parts = [name, ` = ${digits(scale)} · ${digits(qk)}`];
  if (softcap !== null) parts.push(` = ${digits(scaled)}, by the `, explained("softcap"), ` ${digits(capped)}`);
  if (bias) parts.push(`, and a bias of ${digits(isNear(score, capped) ? 0 : score - capped)} is added`);
  return [...parts, softcap === null && !bias ? ` = ${digits(score)}.` : `: ${digits(score)}.`];
}

// The softmax of the query's row, as it follows from the scores, beside the weight that the record holds.
function weightStep(query, key, known) {
  const name = explained("weight", "attention weight"), row = rowOf(query).filter((entry) => entry.share !== FORBIDDEN);
  const parts = [name, " "], learned = chosen.map.learned?.[cellOf("query", query)] ?? 0;
  const scores = row.map((entry) => at("scores", query, entry.place));
  if (chosen.parts.scores) {
    const top = Math.max(...scores), sum = scores.reduce((total, score) => total + Math.exp(score - top), 0);
    const score = at("scores", query, key), own = Math.exp(score - top) / sum;
    parts.push(`= exp(${digits(score)} − ${subtracted(top)}) ÷ ${digits(sum)}`);
    if (learned > 0) parts.push(` · ${digits(1 - learned)}, what the `, explained("sink logit"), " leaves");
    if (Math.abs(own * (1 - learned) - known) > CLOSE_ENOUGH) parts.push(` gives ${digits(own * (1 - learned))}; stored is`);
    parts.push(" = ", ...valueParts(known), `, where ${digits(top)} is the largest score of the row and ${digits(sum)} `);
    parts.push(`the sum of exp(score − ${subtracted(top)}) over the ${row.length} ${row.length === 1 ? "key" : "keys"} that this query sees.`);
  } else parts.push("= softmax of the row = ", ...valueParts(known), ". ", notHere("scores", "the row of scores"));
  if (chosen.block > 1 || Number.isNaN(known)) return parts; // the others of the row are not known
  const larger = row.filter((entry) => entry.share > known).length;
  parts.push(` It is number ${larger + 1} of the row; each key would get ${digits(1 / row.length)} if attention were uniform.`);
  return parts;
}

function outputStep(query, key, weight) {
  const { v, z } = chosen.parts, { dropout } = RECORD.layers[HEADS[choice.head].layer], name = explained("head output");
  const results = z ? z.subarray((query * z.length) / wordsOf("query").length, ((query + 1) * z.length) / wordsOf("query").length) : null;
  const parts = [];
  if (dropout > 0) parts.push(`Dropout with probability ${dropout} changes the weight before it is used. `);
  if (v && dropout === 0) {
    const values = v.subarray((key * v.length) / wordsOf("key").length, ((key + 1) * v.length) / wordsOf("key").length);
    parts.push("weight · ", explained("value", "value"), ` = ${digits(weight)} · ${vectorText(values)} = ${vectorText(values.map((x) => weight * x))}, `);
    parts.push("which is added to the ", name, ".");
  } else if (!v) parts.push("weight · ", explained("value", "value"), " is added to the ", name, ". ", notHere("v", "The value"));
  parts.push(...(results ? [" The sum over all keys is z = ", vectorText(results), "."] : [" ", notHere("z", "The sum over all keys, z,")]));
  return parts;
}
