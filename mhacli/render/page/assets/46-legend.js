// What the colours mean, and what the chosen head is.

function drawLegend() {
  const { layout } = matrix, top = layout.scaleTop;
  const ends = { linear: ["0", tickText(top)], log: [`≤ ${tickText(top / 10 ** RECORD.scale.decades)}`, tickText(top)] };
  const [least, most] = ends[choice.scale] ?? ["smallest", "largest"];
  const what = choice.scale === "rank" ? "rank among this head’s cells" : `${choice.scale}, one scale for all heads`;
  const parts = [
    make("span", { class: "pair" }, least, make("span", { class: "ramp", role: "img", "aria-label": "dark to bright" }), most),
    make("span", {}, `share of a query’s attention · ${what}`),
  ];
  if (layout.shown.block > 1) parts.push(make("span", {}, `a cell is ${layout.shown.block} × ${layout.shown.block} tokens`));
  if (hasClosed(layout.shown)) parts.push(swatch("closed", "not allowed"));
  if (layout.shown.cells.some(Number.isNaN)) parts.push(swatch("missing", "not a number"));
  if (layout.shown.sinkColumns.length) parts.push(sinkWords(layout));
  if (layout.strips.length) {
    parts.push(make("span", { class: "pair" }, "beside the plot: 0", make("span", { class: "ramp of-sinks" }), "1"));
  }
  byId("legend").replaceChildren(...parts);
}

const hasClosed = (map) => map.cells.includes(FORBIDDEN);
const swatch = (name, text) => make("span", { class: "pair" }, make("span", { class: `swatch ${name}` }), text);

function sinkWords({ shown }) {
  const mass = tickText(meanOfRows(shown, sinkShares(shown)));
  const learned = shown.learned ? `, a learned sink ${tickText(meanOfRows(shown, shown.learned))}` : "";
  const all = `${mass} of all attention${learned}`;
  return make("span", { class: "sink" }, choice.hideSinks ? `sinks had ${all}: taken out` : `▾ sinks take ${all}`);
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
  if (head.kind) facts.push(make("span", { class: "chip" }, `${head.sign} ${head.kind}`.trim()));
  if (Number.isFinite(head.entropy)) facts.push(make("span", {}, `entropy ${head.entropy.toPrecision(3)} nats`));
  if (RECORD.layers[head.layer].verified === false) facts.push(make("span", { class: "chip warning" }, "NOT verified"));
  byId("chosen-title").textContent = head.label + (head.kv ?? "");
  byId("facts").replaceChildren(...facts);
  // Not `disabled`, which would take the focus away from whoever pressed the last one.
  byId("previous").setAttribute("aria-disabled", choice.head === 0);
  byId("next").setAttribute("aria-disabled", choice.head === HEADS.length - 1);
}
