// What the colours mean, and what the chosen head is.

function drawLegend() {
  const { map } = chosen, top = scaleTop();
  // A row that sees one key gives it all: such cells are as bright as the top, and no part of the scale.
  const end = `${RECORD.scale.exceeded ? "≥ " : ""}${tickText(top)}`;
  const ends = { linear: ["0", end], log: [`≤ ${tickText(top / 10 ** RECORD.scale.decades)}`, end] };
  const [least, most] = ends[choice.scale];
  const parts = [
    make("span", { class: "pair" }, least, make("span", { class: "ramp", role: "img", "aria-label": "dark to bright" }), most),
    make("span", {}, explained("attention weight"), ` · ${choice.scale}, one scale for all heads`),
  ];
  if (map.block > 1) parts.push(make("span", {}, `a cell is ${map.block} × ${map.block} tokens`));
  if (map.masked) parts.push(swatch("closed", "masked"));
  if (map.missing) parts.push(swatch("missing", "not a number"));
  if (hasSinks()) parts.push(sinkWords());
  else if (choice.hideSinks) parts.push(make("span", { class: "sink" }, "no sink here, none taken out"));
  if (matrix.layout.strips.length) {
    parts.push(make("span", { class: "pair" }, "beside the plot: 0", make("span", { class: "ramp of-sinks" }), "1"));
  }
  byId("legend").replaceChildren(...parts);
}

const swatch = (name, text) => make("span", { class: "pair" }, make("span", { class: `swatch ${name}` }), text);

const MOST_NAMED = 4;

// Which keys the mark stands for in this head, and what they get of all its attention, beside what uniform attention would give.
function sinkWords() {
  const { removed, uniform, learned_mass: learned } = chosen.map, parts = ["▾ ", explained("sinks", "sink"), " of this head: "];
  chosen.sinks.slice(0, MOST_NAMED).forEach((place, i) => parts.push(i ? ", " : "", ...namedPlace("key", place)));
  if (chosen.sinks.length > MOST_NAMED) parts.push(`, ${chosen.sinks.length - MOST_NAMED} more`);
  parts.push(choice.hideSinks ? ", taken out · had " : " · ");
  parts.push(`${tickText(removed)} of all attention, ${tickText(uniform)} if uniform`);
  if (learned !== null) parts.push(` · the sink logit, no key: ${tickText(learned)}`);
  return make("span", { class: "sink" }, ...parts);
}

function buildTitle() {
  const steps = [["previous", "‹", -1], ["next", "›", 1]].map(([id, sign, by]) => {
    const button = make("button", { type: "button", id, "aria-label": `${id} head`, title: `${id} head` }, sign);
    button.addEventListener("click", () => stepHead(by));
    return button;
  });
  const title = byId("chosen-title"), line = make("div", { class: "title" });
  title.before(line);
  line.append(title, make("span", { id: "facts" }), make("span", { class: "steps" }, ...steps));
}

function drawTitle() {
  const head = HEADS[choice.head], facts = [];
  if (head.type) facts.push(make("span", { class: "chip term", title: RECORD.terms[head.type] }, `${head.sign} ${head.type}`.trim()));
  if (Number.isFinite(head.entropy)) facts.push(make("span", {}, explained("entropy"), ` ${head.entropy.toPrecision(3)} nats`));
  if (RECORD.layers[head.layer].verified === false) facts.push(make("span", { class: "chip warning" }, "NOT verified"));
  byId("chosen-title").textContent = head.label + (head.kv ?? "");
  byId("facts").replaceChildren(...facts);
  // Not `disabled`, which would take the focus away from whoever pressed the last one.
  byId("previous").setAttribute("aria-disabled", choice.head === 0);
  byId("next").setAttribute("aria-disabled", choice.head === HEADS.length - 1);
}
