// Totals in each measure, which also select the measure of the plot.
import { byId, make } from "../base/elements.js";
import { percent, plural } from "../base/numbers.js";
import { changed, formatModule, keysOf, moduleValue, reports, titleOf, view } from "../data/view.js";

export function drawTiles() {
  const [report] = reports;
  const keys = keysOf(report);
  byId("tiles").replaceChildren(...keys.map((key) => drawTile(report, key, keys)));
}

function drawTile(report, key, keys) {
  const chosen = key === view.measure;
  const note = key === "rate" ? "FLOPs per second of measured time" : report.measures.get(key).note;
  const unsupported = key === "rate" ? 0 : report.totals(key, view).unsupported[0];
  return make(
    "button",
    {
      type: "button",
      class: "tile",
      role: "radio",
      "aria-checked": String(chosen),
      tabindex: chosen ? "0" : "-1",
      title: note,
      "data-key": key,
      on: { click: () => chooseMeasure(key), keydown: (event) => stepTiles(event, keys) },
    },
    make("span", { class: "tile-title" }, titleOf(key)),
    make("span", { class: "tile-value" }, withoutUnit(formatModule(report, key, 0))),
    ...other(key),
    make("span", { class: "tile-note" }, unsupported ? `${plural(unsupported, "op call")} unsupported` : note),
  );
}

const withoutUnit = (text) => text.replace(/ ?([GKMPT]?)FLOP\/s$/, "$1");

/** Return the value of the other report of a comparison, and the change. */
function other(key) {
  const there = reports[1];
  if (!there) return [];
  if (!keysOf(there).includes(key)) return [make("span", { class: "tile-other" }, "→ unknown")];
  const [before, after] = reports.map((report) => moduleValue(report, key, 0));
  const change = before === after ? "equal" : before ? `${after > before ? "+" : "−"}${percent(Math.abs(after - before), before)}` : "";
  return [make("span", { class: "tile-other" }, `→ ${withoutUnit(formatModule(there, key, 0))} `, make("span", { class: "tile-change" }, change))];
}

function stepTiles(event, keys) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  chooseMeasure(keys[(keys.indexOf(view.measure) + step + keys.length) % keys.length]);
}

function chooseMeasure(key) {
  view.measure = key;
  changed();
  byId("tiles").querySelector(`[data-key="${key}"]`).focus();
}
