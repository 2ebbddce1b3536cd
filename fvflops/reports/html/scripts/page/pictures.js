// The plots of the page, one for each report, with their legend, path and selected module.
import { byId, isolate, make } from "../base/elements.js";
import { percent, plural, short } from "../base/numbers.js";
import { isRate, measureOf, moduleValue, reports, view, widthKey } from "../data/view.js";
import { Icicle } from "../charts/icicle.js";
import { drawLegend } from "../charts/legend.js";
import { drawDetail } from "./detail.js";

export const pictures = [];

/** Add the plot of a report to the page. */
export function addPicture(report) {
  const picture = new Icicle(report, pictures.length, { onSelect, onZoom });
  pictures.push(picture);
  byId("pictures").append(picture.element);
}

function onSelect(picture, aloud) {
  if (aloud) byId("live").textContent = picture.describe(picture.selected);
  drawDetail(picture);
}

function onZoom(picture) {
  drawPath(picture);
  syncZoom(picture);
}

/** Zoom the other picture of a comparison to the module of the same name. */
function syncZoom(picture) {
  for (const other of pictures) {
    const node = other === picture ? undefined : other.nodes.matching(picture.zoomed);
    if (node && node.key !== other.zoomed.key) {
      other.zoomed = other.selected = node;
      other.draw();
    }
  }
}

function drawPath(picture) {
  const { report, zoomed } = picture;
  const items = zoomed.ancestors().map((node) =>
    make(
      "button",
      {
        type: "button",
        class: "crumb",
        "aria-current": node === zoomed ? "location" : undefined,
        title: node.path || report.title,
        on: { click: () => picture.zoom(node) },
      },
      isolate(node.label.slice(0, 200)),
    ),
  );
  byId("path").replaceChildren(...items);
}

function drawHits() {
  const [report] = reports;
  const hits = report.search(view.query);
  if (!hits) {
    byId("hits").textContent = "";
    return;
  }
  let count = 0;
  let sum = 0;
  for (let i = 0; i < report.size; i++) {
    if (!(hits[i] & 1)) continue;
    count += 1;
    if (!(hits[i] & 2)) sum += moduleValue(report, widthKey(), i);
  }
  const share = percent(sum, moduleValue(report, widthKey(), 0));
  byId("hits").textContent = count ? `${plural(count, "module")} found, together ${short(sum, measureOf().unit)} (${share}). Enter zooms to the first.` : "No module has this in its name or class.";
}

export function drawPictures() {
  for (const picture of pictures) picture.draw();
  drawLegend();
  drawPath(pictures[0]);
  drawDetail(pictures[0]);
  drawHits();
  byId("split").disabled = isRate();
}
