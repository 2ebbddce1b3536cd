// Open the page: read its data and draw all parts.
import { byId } from "../base/elements.js";
import { plural } from "../base/numbers.js";
import { Report } from "../data/report.js";
import { changed, isRate, keysOf, onChange, reports, view } from "../data/view.js";
import { differenceTable } from "../tables/differences.js";
import { moduleTable } from "../tables/modules.js";
import { operatorTable } from "../tables/operators.js";
import { drawComparison, listenToEqual, listenToFiles, openGivenOther } from "./comparison.js";
import { fillControls, listenToControls } from "./controls.js";
import { drawAbout, drawLedger } from "./coverage.js";
import { addPicture, drawPictures, pictures } from "./pictures.js";
import { listenToExports } from "./export.js";
import { listenToTheme } from "./theme.js";
import { drawTiles } from "./tiles.js";
import { drawTopCosts } from "./top_costs.js";
import { makeViews, redrawView, showModules } from "./views.js";

const tables = {};

function draw(part) {
  if (part === "all") drawTiles();
  drawPictures();
  redrawView();
  drawTopCosts();
  if (part === "plots") return;
  if (part === "all") drawComparison(tables.differences);
  const key = isRate() ? "rate" : "share";
  if (["share", "rate"].includes(tables.modules.sort.key)) tables.modules.sort = { key, descending: true };
  tables.modules.draw();
  if (part === "search") return;
  tables.operators.draw();
  byId("operator-label").classList.toggle("active", Boolean(view.operator));
  byId("phase-label").classList.toggle("active", Boolean(view.phase));
}

function showPlot() {
  byId("h-picture").scrollIntoView({ block: "start" });
}

function openModule(module, node) {
  showModules();
  if (node.members.length > 1) pictures[0].zoom(node);
  else pictures[0].zoomTo(module);
  showPlot();
  pictures[0].box.focus({ preventScroll: true });
}

function openOperator(name) {
  byId("operator").value = view.operator = view.operator === name ? "" : name;
  changed();
  showPlot();
}

/** Zoom the first plot that has the module. */
function openPath(path) {
  showModules();
  const picture = pictures.find((item) => item.report.find(path) !== undefined);
  picture.zoomTo(picture.report.find(path));
}

function makeTables() {
  tables.modules = moduleTable(pictures[0].nodes, openModule);
  tables.operators = operatorTable(openOperator);
  tables.differences = differenceTable(pictures, openPath);
  byId("module-hint").textContent = `${plural(reports[0].size, "module")}; submodules are included, equal modules are one row. Click a name to zoom to it.`;
  byId("operator-hint").textContent = "Click a name to show only that operator in the plot.";
}

function start() {
  listenToTheme();
  const report = new Report(JSON.parse(byId("data").textContent));
  reports.push(report);
  const keys = keysOf(report);
  const isProfile = Boolean(report.record.timeline);
  view.measure = (isProfile && keys.includes("time") && "time") || keys.find((key) => report.totals(key, view).total[0] > 0) || keys[0];
  addPicture(report);
  openGivenOther();
  makeTables();
  onChange(draw);
  fillControls();
  makeViews();
  drawAbout();
  drawLedger();
  changed();
  listenToControls();
  listenToFiles();
  listenToEqual(tables.differences);
  listenToExports(tables);
  performance.mark("fvflops-drawn");
}

start();
