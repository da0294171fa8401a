// The beginning: everything is built once, and drawn anew after every choice.

function drawAll() {
  drawControls();
  drawTitle();
  bringIntoView();
  drawPlot();
  drawStory();
  drawTokens();
  drawThumbnails();
  markStatistics();
  writeFragment();
}

function redraw() {
  if (chosen.map === null) return;
  sizeThumbnails();
  drawPlot();
  drawStory();
  drawTokens();
}

function listenToWindow() {
  let wait = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(wait);
    wait = requestAnimationFrame(redraw);
  });
  window.addEventListener("hashchange", () => choose({ query: -1, key: -1, side: "query", ...readFragment(location.hash) }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

function say(message) {
  document.querySelector("main").prepend(make("p", { class: "warning", role: "alert" }, message));
}

// The parts to explore get a frame of their own, within which the matrix stays in sight.
function showSections() {
  for (const section of document.querySelectorAll("[data-script]")) section.hidden = false;
  const explore = make("div", { class: "explore" });
  byId("heads").before(explore);
  explore.append(byId("heads"), byId("chosen"), byId("tokens"));
}

async function start() {
  buildControls();
  buildStatistics();
  if (HEADS.length) {
    if (typeof DecompressionStream === "undefined") throw new Error("it needs a browser of 2023 or later");
    showSections();
    buildTitle();
    buildMatrix();
    buildThumbnails();
    buildTokens();
    await choose(readFragment(location.hash));
    listenToWindow();
  }
  performance.mark("mha-ready");
  document.documentElement.dataset.ready = "true";
}

start().catch((fault) => say(`The picture could not be drawn: ${fault.message}`));
