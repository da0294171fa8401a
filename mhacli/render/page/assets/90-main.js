// The beginning: what Python wrote is connected once, and drawn anew after every choice.

function drawAll() {
  byId("scale").querySelector(`[value=${choice.scale}]`).checked = true;
  byId("sinks").checked = choice.hideSinks;
  byId("sequence").value = choice.sequence;
  drawTitle();
  drawPlot();
  followCursor();
  drawLegend();
  drawStory();
  drawThumbnails();
  markStatistics();
  writeAddress();
}

// What depends on the pointer.
function drawPointed() {
  drawFrames();
  drawReadout();
  drawTokens();
}

function listenToControls() {
  const sequences = byId("sequence");
  const text = (at) => RECORD.texts[RECORD.layers[0].queries[at]].slice(0, 8).join(" ");
  sequences.append(...RECORD.numbers.map((number, at) => new Option(`${number}: ${text(at)}`, at)));
  sequences.parentElement.hidden = RECORD.numbers.length < 2;
  const follow = () => choose({ sequence: Number(sequences.value), query: -1, key: -1 });
  sequences.addEventListener("change", follow);
  byId("scale").addEventListener("change", ({ target }) => choose({ scale: target.value }));
  byId("sinks").addEventListener("change", ({ target }) => choose({ hideSinks: target.checked }));
  byId("previous").addEventListener("click", () => stepHead(-1));
  byId("next").addEventListener("click", () => stepHead(1));
  document.addEventListener("keydown", ({ key, target }) => {
    if (key === "?" && !target.matches("select")) byId("help-text").showPopover();
  });
}

function listenToWindow() {
  let wait = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(wait);
    wait = requestAnimationFrame(() => choose({}));
  });
  addEventListener("hashchange", () => choose(readAddress()));
}

async function start() {
  const root = document.documentElement;
  root.dataset.script = "true";
  const colours = RECORD.ramp.filter((_, level) => level % 17 === 0);
  root.style.setProperty("--ramp", colours.map((colour) => `rgb(${colour})`).join());
  buildStatistics();
  if (HEADS.length) {
    buildThumbnails();
    listenToControls();
    listenToMatrix();
    listenToTokens();
    await choose(readAddress());
    listenToWindow();
  }
  performance.mark("mha-ready");
  root.dataset.ready = "true";
}

start().catch(({ message }) => {
  const text = `The picture could not be drawn: ${message}. It needs a browser of 2024 or later.`;
  document.querySelector("main").prepend(make("p", { class: "warning", role: "alert" }, text));
});
