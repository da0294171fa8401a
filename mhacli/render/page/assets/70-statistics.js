// The table of heads, which Python wrote: its columns sort it, and its rows choose a head.

function buildStatistics() {
  const table = document.querySelector("#statistics table");
  if (!table?.tHead || !table.tBodies.length) return;
  [...table.tHead.rows[table.tHead.rows.length - 1].cells].forEach((cell, column) => makeSortable(table, cell, column));
  for (const row of table.tBodies[0].rows) if (row.dataset.head) makeChooser(row);
}

function makeSortable(table, cell, column) {
  const button = make("button", { type: "button" }, ...cell.childNodes), own = table.tBodies[0].rows[0]?.cells[column];
  cell.append(button);
  cell.classList.toggle("word", own?.matches("th, .word") ?? false);
  button.addEventListener("click", () => {
    const isUp = cell.getAttribute("aria-sort") !== "ascending" && (cell.hasAttribute("aria-sort") || !startsDown(table, column));
    for (const other of cell.parentElement.cells) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", isUp ? "ascending" : "descending");
    sortRows(table.tBodies[0], column, isUp ? 1 : -1);
  });
}

// Numbers are first looked at from the largest down; names, and the numbers of heads, from the first on.
function startsDown(table, column) {
  const cells = [...table.tBodies[0].rows].filter((row) => row.cells[column]?.tagName === "TD");
  return cells.some((row) => typeof sortKey(row, column) === "number");
}

// A number, a text, or null for what is missing.
function sortKey(row, column) {
  const cell = row.cells[column], text = (cell?.dataset.value ?? cell?.textContent ?? "").trim();
  if (text === "" || text === "–" || text === "nan") return null;
  const number = Number(text.replace(/[,%\s]/g, ""));
  return Number.isNaN(number) ? text : number;
}

function sortRows(body, column, way) {
  const rows = [...body.rows].map((row, at) => ({ row, at: Number((row.dataset.order ??= at)), key: sortKey(row, column) }));
  const isFirst = column === 0;
  rows.sort((a, b) => {
    if (isFirst) return way * (a.at - b.at);
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.at - b.at;
    return way * orderOf(a.key, b.key) || a.at - b.at;
  });
  body.append(...rows.map(({ row }) => row));
}

// Numbers before texts.
function orderOf(a, b) {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a < b ? -1 : a > b ? 1 : 0;
}

function makeChooser(row) {
  const name = [...row.cells].findLast((cell) => cell.tagName === "TH");
  const button = make("button", { type: "button" }, ...name.childNodes);
  name.append(button);
  row.addEventListener("click", () => {
    if (!String(getSelection())) choose({ head: Number(row.dataset.head) });
  });
}

function markStatistics() {
  for (const row of document.querySelectorAll("#statistics tbody tr[data-head]")) {
    const isChosen = Number(row.dataset.head) === choice.head, isNew = isChosen && !row.classList.contains("current");
    row.classList.toggle("current", isChosen);
    row.querySelector("button").setAttribute("aria-pressed", isChosen);
    if (isNew) showRow(row);
  }
}

// Within the table's own frame: the page itself stays where it is.
function showRow(row) {
  const frame = row.closest(".scroll"), top = row.offsetTop - frame.scrollTop, height = row.offsetHeight;
  if (top < height || top > frame.clientHeight - height) frame.scrollTop = row.offsetTop - frame.clientHeight / 2;
}
