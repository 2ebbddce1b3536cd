// The controls of the plot: phase, operator, colours, search.
import { byId, make } from "../base/elements.js";
import { changed, reports, view } from "../data/view.js";
import { pictures } from "./pictures.js";

export function fillControls() {
  const [report] = reports;
  const options = (select, label, names, chosen) => {
    const items = [["", label], ...names.map((name) => [name, name])];
    select.replaceChildren(...items.map(([value, title]) => make("option", { value, selected: value === chosen }, title.slice(0, 80))));
  };
  options(byId("phase"), "all", report.phases, view.phase);
  byId("phase-label").hidden = report.phases.length < 2;
  const noPhase = report.record.phases.indexOf("");
  const ran = new Set(report.rows.operator.filter((_, row) => report.rows.phase[row] !== noPhase));
  options(byId("operator"), "all", [...ran].map((i) => report.operators[i]).sort(), view.operator);
  const splits = [["class", "Class"], ["operator", "Operator"]];
  if (report.phases.length > 1) splits.splice(1, 0, ["phase", "Phase"]);
  if (reports.length === 2) splits.push(["change", "Change"]);
  const radios = splits.map(([value, title]) =>
    make(
      "label",
      {},
      make("input", {
        type: "radio",
        name: "split",
        value,
        checked: value === view.split,
        on: {
          change: () => {
            view.split = value;
            changed("plots");
          },
        },
      }),
      title,
    ),
  );
  byId("split").replaceChildren(make("legend", {}, "Split by"), ...radios);
}

/** Listen to the controls, to the key of the search and to the width of the window. */
export function listenToControls() {
  byId("phase").addEventListener("change", (event) => {
    view.phase = event.target.value;
    changed();
  });
  byId("operator").addEventListener("change", (event) => {
    view.operator = event.target.value;
    changed();
  });
  let waiting = 0;
  const searchNow = () => {
    clearTimeout(waiting);
    if (view.query === byId("search").value.trim()) return;
    view.query = byId("search").value.trim();
    changed("search");
  };
  byId("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(searchNow, 120);
  });
  byId("search").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    searchNow();
    const hits = reports[0].search(view.query);
    const first = hits ? hits.findIndex((hit) => hit & 1) : -1;
    if (first >= 0) pictures[0].zoomTo(first);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    byId("search").focus();
  });
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (width === window.innerWidth) return;
    width = window.innerWidth;
    changed("plots");
  });
}
