// Compare the report of the page with that of another file.
import { byId } from "../base/elements.js";
import { plural } from "../base/numbers.js";
import { readFile } from "../data/read_file.js";
import { changed, formatModule, measureOf, reports, view, widthKey } from "../data/view.js";
import { fillControls } from "./controls.js";
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

async function compareWith(file) {
  try {
    const report = readFile(await file.text());
    report.file = file.name;
    closeOther(false);
    reports.push(report);
    view.split = "change";
    addPicture(report);
    announce(`Compared with ${file.name}.`, false);
  } catch (error) {
    announce(`${file.name} cannot be compared with this report: ${error.message}.`, true);
    return;
  }
  fillControls();
  changed();
}

function closeOther(redraw = true) {
  if (reports.length < 2) return;
  reports.pop();
  pictures.pop().element.remove();
  if (view.split === "change") view.split = "class";
  if (redraw) {
    fillControls();
    changed();
  }
}

function announce(message, wrong) {
  byId("notice").textContent = wrong ? message : "";
  byId("notice").hidden = !wrong;
  byId("live").textContent = message;
}

/** Draw what tells the two reports apart, and the table of their differences. */
export function drawComparison(differences) {
  const both = reports.length === 2;
  const totalOf = (report) => (report.measures.has(widthKey()) ? formatModule(report, widthKey(), 0) : "unknown");
  byId("comparison").hidden = !both;
  pictures.forEach((picture, index) => {
    picture.heading.hidden = !both;
    picture.heading.firstChild.textContent = `${index ? `Other (${picture.report.file.slice(0, 200)})` : "This"}: ${picture.report.title.slice(0, 200)} · ${measureOf().title} ${totalOf(picture.report)}`;
  });
  if (!both) return;
  const [here, there] = reports;
  const only = (a, b) => a.paths.filter((path) => b.find(path) === undefined).length;
  byId("compared").textContent = `${measureOf().title}: ${totalOf(here)} here, ${totalOf(there)} in the other. Modules are matched by name; ${plural(only(here, there), "module")} only here, ${plural(only(there, here), "module")} only in the other. Equal modules are not listed.`;
  if (!there.phases.length) byId("compared").textContent += " The other file is not split by phase and operator.";
  differences.draw();
}
