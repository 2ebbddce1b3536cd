// Compare the report of the page with another: one that the page was made with, or one of a file.
import { byId } from "../base/elements.js";
import { percent, plural, signed } from "../base/numbers.js";
import { readFile } from "../data/read_file.js";
import { Report } from "../data/report.js";
import { changed, formatModule, measureOf, moduleValue, namesOf, reports, view, widthKey } from "../data/view.js";
import { fillControls } from "./controls.js";
import { drawAbout } from "./coverage.js";
import { addPicture, pictures } from "./pictures.js";

/** Listen for the other file: chosen, or dropped on the page. */
export function listenToFiles() {
  byId("other").addEventListener("change", (event) => {
    if (event.target.files[0]) compareWith(event.target.files[0]);
    event.target.value = "";
  });
  byId("uncompare").addEventListener("click", () => closeOther());
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) compareWith(event.dataTransfer.files[0]);
  });
}

/** Open the other report with which the page was made, if any. */
export function openGivenOther() {
  const data = byId("data-other");
  if (data) openOther(new Report(JSON.parse(data.textContent)));
}

async function compareWith(file) {
  try {
    const report = readFile(await file.text());
    report.file = file.name;
    closeOther(false);
    openOther(report);
    announce(`Compared with ${file.name}.`, false);
  } catch (error) {
    announce(`${file.name} cannot be compared with this report: ${error.message}.`, true);
    return;
  }
  fillControls();
  changed();
}

function openOther(report) {
  reports.push(report);
  view.split = "change";
  addPicture(report);
  matchPictures();
  drawAbout();
}

function closeOther(redraw = true) {
  if (reports.length < 2) return;
  reports.pop();
  pictures.pop().element.remove();
  matchPictures();
  drawAbout();
  if (view.split === "change") view.split = "class";
  if (redraw) {
    fillControls();
    changed();
  }
}

function matchPictures() {
  pictures.forEach((picture, index) => picture.nodes.compareWith(reports[1 - index]));
}

function announce(message, wrong) {
  byId("notice").textContent = wrong ? message : "";
  byId("notice").hidden = !wrong;
  byId("live").textContent = message;
}

/** Draw what tells the two reports apart, and the table of their differences. */
export function drawComparison(differences) {
  const both = reports.length === 2;
  const names = namesOf();
  const totalOf = (report) => (report.measures.has(widthKey()) ? formatModule(report, widthKey(), 0) : "unknown");
  byId("comparison").hidden = !both;
  pictures.forEach((picture, index) => {
    picture.heading.hidden = !both;
    picture.heading.firstChild.textContent = `${names[index].slice(0, 200)} · ${measureOf().title} ${totalOf(picture.report)}`;
  });
  if (!both) return;
  differences.draw();
  byId("compared").textContent = describe(differences);
  byId("equal-rows").hidden = !differences.equal;
  byId("equal-rows").textContent = view.showEqual ? "Hide equal modules" : `Show ${plural(differences.equal, "equal module")}`;
}

/** Listen to what shows or hides equal modules. */
export function listenToEqual(differences) {
  byId("equal-rows").addEventListener("click", () => {
    view.showEqual = !view.showEqual;
    drawComparison(differences);
  });
}

const onlyIn = (count, name) => (count ? `, ${plural(count, "module")} only in ${name}` : "");

function describe({ equal, different }) {
  const [here, there] = reports;
  const [first, second] = namesOf();
  const only = (a, b) => a.paths.filter((path) => b.find(path) === undefined).length;
  const key = widthKey();
  const sentences = [];
  if (there.measures.has(key)) {
    const [before, after] = reports.map((report) => moduleValue(report, key, 0));
    const change = before ? ` (${after > before ? "+" : ""}${percent(after - before, before)})` : "";
    sentences.push(`${measureOf().title}: ${formatModule(here, key, 0)} → ${formatModule(there, key, 0)}, ${signed(after - before, measureOf().unit)}${change}.`);
  } else sentences.push(`${second} has no ${measureOf().title}.`);
  sentences.push(`Modules are matched by name: ${plural(different, "module")} of both ${different === 1 ? "differs" : "differ"}, ${plural(equal, "module")} ${equal === 1 ? "is" : "are"} equal${onlyIn(only(here, there), first)}${onlyIn(only(there, here), second)}.`);
  const tables = reports.map(({ record }) => record.about.table);
  if (tables[0] !== tables[1] && tables[1]) sentences.push(`The conventions differ: ${tables[0]} and ${tables[1]}.`);
  if (!there.phases.length) sentences.push(`${second} is not split by phase and operator.`);
  return sentences.join(" ");
}
