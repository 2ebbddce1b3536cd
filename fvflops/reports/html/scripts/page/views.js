// The views of the model's cost: its modules, and those that a module of views/ adds.
import { byId, make } from "../base/elements.js";
import { reports, view } from "../data/view.js";
import { pictures } from "./pictures.js";

const charts = new Map(); // name → chart
const views = [{ name: "modules", title: "Modules", make: null, has: () => true }];
let chosen = "modules";

/** Add a view: its name and title, what makes its chart of a report, and whether a report has data for it. */
export const addView = (item) => views.push(item);

export function announce(module, text) {
  byId("live").textContent = text;
}

export function openModule(module, text) {
  announce(module, text);
  choose("modules");
  pictures[0].zoomTo(module);
}

/** Make a tab for each view that the report has data for. */
export function makeViews() {
  const [report] = reports;
  const shown = views.filter(({ has }) => has(report));
  byId("views").hidden = shown.length < 2;
  byId("views").replaceChildren(
    ...shown.map(({ name, title }) =>
      make("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `view-${name}`, on: { click: () => choose(name), keydown: (event) => step(event, shown) } }, title),
    ),
  );
  for (const { name } of shown.slice(1)) byId("view-modules").after(make("div", { id: `view-${name}`, role: "tabpanel", "aria-labelledby": `tab-${name}`, hidden: true }));
  mark();
}

function step(event, shown) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const names = shown.map(({ name }) => name);
  choose(names[(names.indexOf(chosen) + by + names.length) % names.length]);
  byId(`tab-${chosen}`).focus();
}

function choose(name) {
  chosen = name;
  mark();
  drawView();
}

function mark() {
  for (const tab of byId("views").children) {
    const isChosen = tab.id === `tab-${chosen}`;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
  }
  for (const { name } of views) if (byId(`view-${name}`)) byId(`view-${name}`).hidden = name !== chosen;
  for (const id of ["split", "legend"]) byId(id).hidden = !["modules", "timeline"].includes(chosen);
  byId("detail").hidden = chosen !== "modules";
  byId("filters").hidden = chosen === "memory";
  byId("search-label").hidden = chosen !== "modules";
}

export const showModules = () => chosen !== "modules" && choose("modules");

/** Draw the chosen view, unless it is the modules', which is always drawn. */
export function drawView() {
  const [report] = reports;
  if (chosen === "modules") {
    pictures.forEach((picture) => picture.draw()); // its width was unknown while hidden
    return;
  }
  if (!charts.has(chosen)) {
    charts.set(chosen, views.find(({ name }) => name === chosen).make(report));
    byId(`view-${chosen}`).append(charts.get(chosen).element);
  }
  charts.get(chosen).draw();
}

export const redrawView = () => chosen !== "modules" && drawView();

/** Return the element that shows the chosen view. */
export const chosenBox = () => (chosen === "modules" ? pictures.map(({ box }) => box) : [charts.get(chosen).box]);

export const chosenView = () => `${chosen}-${view.measure}`;
