// All heads at a glance: one small picture each, on one scale.

const thumbnails = { buttons: [], drawn: "", turn: 0 };

function buildThumbnails() {
  const grid = make("div", { class: "grid", role: "group", "aria-label": "heads: arrow keys move, Enter chooses" });
  const layers = [...new Set(HEADS.map((head) => head.layer))], isTable = layers.length > 1;
  const numbers = [...new Set(HEADS.map((head) => head.head))].sort((a, b) => a - b);
  thumbnails.shape = { layers, numbers, isTable };
  if (isTable) {
    grid.classList.add("table");
    const names = numbers.map((number) => make("span", { class: "column-name" }, String(number)));
    grid.append(make("span", { class: "corner row-name" }, "head"), ...names);
  }
  for (const layer of layers) {
    if (isTable) grid.append(make("span", { class: "row-name" }, RECORD.layers[layer].label));
    for (const number of isTable ? numbers : HEADS.map((head) => head.head)) {
      const index = HEADS.findIndex((head) => head.layer === layer && head.head === number);
      grid.append(index < 0 ? make("span") : makeThumbnail(index, isTable));
    }
  }
  byId("thumbnails").append(make("div", { class: "scroll" }, grid), make("p", { id: "thumbnails-note", class: "note" }));
  grid.addEventListener("keydown", pressOnThumbnails);
  sizeThumbnails();
}

function makeThumbnail(index, isTable) {
  const head = HEADS[index], canvas = make("canvas", { width: 1, height: 1 });
  const entropy = Number.isFinite(head.entropy) ? ` · entropy ${head.entropy.toPrecision(3)} nats` : "";
  const label = `${head.label}${head.type ? ` · ${head.type}` : ""}${entropy}`;
  const button = make("button", { type: "button", "data-head": index, "aria-label": label, title: label, tabindex: -1 }, canvas);
  const name = isTable ? head.sign : `head ${head.head} ${head.sign}`;
  button.append(make("span", { class: "name", "aria-hidden": "true" }, name));
  button.addEventListener("click", () => choose({ head: index }));
  thumbnails.buttons[index] = button;
  return button;
}

// As large as the room allows, so that all heads of a model of ordinary size are seen at once.
function sizeThumbnails() {
  const { numbers, layers, isTable } = thumbnails.shape, area = byId("thumbnails");
  const room = area.clientWidth - (isTable ? 2 + longestName(layers) * 7 : 0);
  const size = isTable
    ? Math.max(18, Math.min(64, Math.floor(room / numbers.length) - 3, Math.max(26, Math.floor(520 / layers.length) - 15)))
    : Math.max(56, Math.min(92, Math.floor(room / Math.min(4, HEADS.length)) - 14));
  area.style.setProperty("--thumbnail", `${size}px`);
  area.style.setProperty("--heads", String(numbers.length));
}

const longestName = (layers) => Math.max(...layers.map((layer) => RECORD.layers[layer].label.length));

// Pictures are made a few at a time, so that the page answers meanwhile.
async function drawThumbnails() {
  markThumbnail();
  const wanted = [choice.sequence, choice.scale, choice.hideSinks].join();
  if (thumbnails.drawn === wanted) return;
  thumbnails.drawn = wanted;
  const turn = ++thumbnails.turn;
  delete document.documentElement.dataset.drawn;
  let paused = performance.now();
  for (let head = 0; head < HEADS.length; head++) {
    const map = await loadMap(mapIndex(head));
    if (turn !== thumbnails.turn) return;
    paintThumbnail(head, map);
    if (performance.now() - paused < 24) continue;
    await new Promise((resume) => setTimeout(resume));
    paused = performance.now();
  }
  tellThumbnails();
  document.documentElement.dataset.drawn = "true";
}

// At most as large as it is seen, so that all of a long text is in it.
const MOST_PIXELS = 184;

function paintThumbnail(head, map) {
  const canvas = thumbnails.buttons[head].firstChild, shrunk = Math.min(1, MOST_PIXELS / Math.max(map.rows, map.columns));
  Object.assign(canvas, { width: Math.ceil(map.columns * shrunk), height: Math.ceil(map.rows * shrunk) });
  canvas.getContext("2d").drawImage(imageOf(map, cellsOf(map)), 0, 0, canvas.width, canvas.height);
}

function tellThumbnails() {
  const block = Math.max(...RECORD.maps.map((map) => map.block));
  const size = block > 1 ? ` · a cell is ${block} × ${block} tokens` : "";
  const scale = `one scale for all: ${choice.scale}, up to ${tickText(scaleTop())}`;
  const types = new Map(HEADS.filter((head) => head.sign && head.type).map((head) => [head.sign, head.type]));
  const signs = [...types].map(([sign, type]) => make("span", { class: "pair term", title: RECORD.terms[type] }, `${sign} ${type}`));
  byId("thumbnails-note").replaceChildren(make("span", {}, `${scale}${size}`), ...signs);
}

// One of the pictures is reached by Tab, the others by arrow keys.
function markThumbnail() {
  thumbnails.buttons.forEach((button, head) => {
    button.setAttribute("aria-pressed", head === choice.head);
    button.tabIndex = head === choice.head ? 0 : -1;
  });
}

function pressOnThumbnails(event) {
  const next = nextThumbnail(event.key, Number(event.target.dataset.head));
  if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  thumbnails.buttons[next].tabIndex = 0;
  thumbnails.buttons[next].focus();
}

// The neighbour in a row, or the head of that number in the next layer that has it.
function nextThumbnail(key, at) {
  const { layer, head } = HEADS[at], last = HEADS.length - 1;
  const found = {
    ArrowLeft: () => Math.max(0, at - 1),
    ArrowRight: () => Math.min(last, at + 1),
    Home: () => HEADS.findIndex((one) => one.layer === layer),
    End: () => HEADS.findLastIndex((one) => one.layer === layer),
    ArrowUp: () => HEADS.findLastIndex((one) => one.layer < layer && one.head === head),
    ArrowDown: () => HEADS.findIndex((one) => one.layer > layer && one.head === head),
  }[key]?.();
  return found === -1 ? at : found;
}
