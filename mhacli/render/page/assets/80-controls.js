// Switches of the whole page, and its help.

function buildControls() {
  const controls = byId("controls");
  if (HEADS.length) {
    if (RECORD.sequences > 1) controls.append(sequenceChooser());
    controls.append(segments("scale", "scale", SCALES, choice.scale, (scale) => choose({ scale })), sinkSwitch());
  }
  controls.append(segments("theme", "theme", THEMES, "auto", useTheme));
  if (HEADS.length) controls.append(helpButton());
  controls.hidden = false;
}

function segments(id, title, values, current, act) {
  const field = make("fieldset", { id, class: "segments" }, make("legend", {}, title));
  for (const value of values) {
    const input = make("input", { type: "radio", name: id, value });
    input.checked = value === current;
    input.addEventListener("change", () => act(value));
    field.append(make("label", {}, input, make("span", {}, value)));
  }
  return field;
}

function sinkSwitch() {
  const input = make("input", { type: "checkbox", id: "sinks", role: "switch" });
  input.addEventListener("change", () => choose({ hideSinks: input.checked }));
  const why = "take sinks out, and renormalise the rest of each row";
  return make("label", { class: "switch", title: why }, input, make("span", {}, "hide sinks"));
}

function sequenceChooser() {
  const select = make("select", { id: "sequence" });
  RECORD.numbers.forEach((number, at) => {
    const words = RECORD.texts[RECORD.layers[0].queries[at]].slice(0, 8).join(" ");
    select.append(make("option", { value: at }, `${number}: ${words.length > 40 ? `${words.slice(0, 39)}…` : words}`));
  });
  select.addEventListener("change", () => choose({ sequence: Number(select.value), query: -1, key: -1 }));
  return make("label", { class: "chooser" }, "sequence ", select);
}

function useTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  if (chosen.map) drawPlot();
}

function drawControls() {
  for (const input of byId("scale").querySelectorAll("input")) input.checked = input.value === choice.scale;
  byId("sinks").checked = choice.hideSinks;
  if (byId("sequence")) byId("sequence").value = choice.sequence;
}

const HELP = [
  ["matrix", "arrow keys move · Home, End: ends of the row · Enter: strongest key · + − 0: zoom, fit · [ ]: other head"],
  ["matrix, pointer", "rest on a cell to read it · click to choose it and read how its weight comes about · ctrl and wheel to zoom · drag to move"],
  ["heads", "arrow keys move · Enter chooses"],
  ["tokens", "up, down: along the text · left, right: queries, keys · Enter or click: keep the lines"],
  ["anywhere", "? this help · Tab: on to the next part"],
];

function helpButton() {
  const rows = HELP.flatMap(([where, what]) => [make("dt", {}, where), make("dd", {}, what)]);
  const close = make("button", { type: "button", autofocus: true }, "close");
  const dialog = make("dialog", { id: "help-text", "aria-label": "keys" });
  dialog.append(make("h2", {}, "keys"), make("dl", {}, ...rows), close);
  close.addEventListener("click", () => dialog.close());
  document.body.append(dialog);
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches?.("select, input:not([type=radio], [type=checkbox], [type=range])");
    if (event.key === "?" && !isTyping && !event.ctrlKey && !event.metaKey && !dialog.open) dialog.showModal();
  });
  const button = make("button", { type: "button", id: "help", "aria-label": "keys and help", title: "keys (?)" }, "?");
  button.addEventListener("click", () => dialog.showModal());
  return button;
}
