// All heads at a glance: a small picture each, on one scale; and Python's table of statistics.

function buildThumbnails() {
  const group = byId("thumbnails"), { layers } = RECORD, isTable = layers.length > 1;
  const numbers = [...new Set(HEADS.map((head) => head.head))].sort((a, b) => a - b);
  group.classList.toggle("table", isTable);
  group.style.setProperty("--layers", layers.length);
  group.style.setProperty("--heads", numbers.length);
  if (isTable) {
    const add = (kind, name, row, column) => group.append(placed(span(kind, name), row, column));
    layers.forEach((layer, row) => add("row-name", layer.label, row + 2, 1));
    numbers.forEach((number, column) => add("column-name", String(number), 1, column + 2));
  }
  HEADS.forEach(({ layer, head, label: name, about, sign }, index) => {
    const words = [name, about].filter(Boolean).join(" · ");
    const caption = isTable ? sign : `head ${head} ${sign}`;
    const attributes = { type: "button", "data-head": index, "aria-label": words, title: words };
    const button = make("button", attributes, make("canvas"));
    button.append(make("span", { class: "name", "aria-hidden": "true" }, caption));
    group.append(isTable ? placed(button, layer + 2, numbers.indexOf(head) + 2) : button);
  });
  const types = new Map(HEADS.filter((head) => head.type).map((head) => [head.sign, head.type]));
  const signWords = ([sign, type]) => make("span", {}, `${sign} `, ...marked(`{${type}}`));
  byId("signs").append(...[...types].map(signWords));
  group.addEventListener("keydown", pressOnThumbnail);
  document.addEventListener("click", ({ target }) => {
    const { head } = target.closest?.("[data-head]")?.dataset ?? {};
    if (head !== undefined && !isTextSelected()) choose({ head: Number(head) });
  });
}

function placed(element, row, column) {
  element.style.gridArea = `${row} / ${column}`;
  return element;
}

// The neighbour in a row, or the head of that number in the next layer that has it.
function pressOnThumbnail(event) {
  const at = Number(event.target.dataset.head), { layer, head } = HEADS[at];
  const next = {
    ArrowLeft: at - 1,
    ArrowRight: at + 1,
    ArrowUp: HEADS.findLastIndex((one) => one.layer < layer && one.head === head),
    ArrowDown: HEADS.findIndex((one) => one.layer > layer && one.head === head),
  }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  if (!HEADS[next]) return;
  byId("thumbnails").querySelector(`[data-head="${next}"]`).focus();
  choose({ head: next });
}

// Pictures are made one after another, so that the page answers meanwhile.
async function drawThumbnails() {
  const group = byId("thumbnails"), buttons = group.querySelectorAll("button");
  buttons.forEach((button, head) => {
    button.setAttribute("aria-pressed", head === choice.head);
    button.tabIndex = head === choice.head ? 0 : -1;
  });
  if (!isStale(group, choice.scale, choice.hideSinks, choice.sequence)) return;
  const drawn = group.dataset.drawn;
  delete document.documentElement.dataset.drawn;
  for (const [head, button] of buttons.entries()) {
    const map = await loadMap(head);
    if (group.dataset.drawn !== drawn) return;
    paint(button.firstChild, map);
  }
  document.documentElement.dataset.drawn = "true";
}

// A click on a heading sorts the table. Python says in which order: rows without a value come last.
function buildStatistics() {
  const table = document.querySelector("#statistics table");
  if (!table) return;
  const [body] = table.tBodies;
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    asButton(heading);
    heading.addEventListener("click", () => sortRows(body, heading, RECORD.orders[column]));
  });
  [...body.rows].forEach((row, place) => {
    row.dataset.place = place;
    if (row.dataset.head) asButton([...row.cells].findLast((cell) => cell.tagName === "TH"));
  });
}

const asButton = (cell) => cell.append(make("button", { type: "button" }, ...cell.childNodes));

function sortRows(body, heading, { first, places }) {
  const other = { ascending: "descending", descending: "ascending" };
  const way = other[heading.getAttribute("aria-sort")] ?? first;
  const order = way === first ? places : places.toReversed();
  for (const cell of heading.parentElement.cells) cell.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", way);
  const rows = [...body.rows].sort((a, b) => a.dataset.place - b.dataset.place);
  const rest = rows.filter((_, place) => !order.includes(place));
  body.append(...order.map((place) => rows[place]), ...rest);
}

function markStatistics() {
  for (const row of document.querySelectorAll("#statistics tr[data-head]")) {
    const isChosen = Number(row.dataset.head) === choice.head;
    row.querySelector("button").setAttribute("aria-pressed", isChosen);
    if (isChosen) showRow(row);
  }
}

// Within the table's own frame: the page itself stays where it is.
function showRow(row) {
  const frame = row.closest(".scroll"), { offsetTop, offsetHeight } = row;
  const top = offsetTop - frame.scrollTop, last = frame.clientHeight - offsetHeight;
  if (top < offsetHeight || top > last) frame.scrollTop = offsetTop - frame.clientHeight / 2;
}
