// What costs most, in words.
import { byId, isolate, make } from "../base/elements.js";
import { findCosts, findDifferences } from "../data/findings.js";
import { reports } from "../data/view.js";
import { pictures } from "./pictures.js";
import { showModules } from "./views.js";

export function drawTopCosts() {
  const [picture] = pictures;
  const [here, there] = reports;
  const sentences = there ? findDifferences(here, there, picture.nodes) : findCosts(here, picture.nodes);
  byId("h-top-costs").textContent = there ? "Differences" : "Top costs";
  const open = (node) => {
    showModules();
    picture.zoom(node);
  };
  const link = (node) => make("button", { type: "button", class: "link", title: node.path, on: { click: () => open(node) } }, isolate((node.path || "the whole model").slice(-80)));
  byId("top-costs").hidden = !sentences.length;
  byId("top-costs-list").replaceChildren(...sentences.map((parts) => make("li", {}, ...parts.map((part) => (typeof part === "string" ? isolate(part) : link(part))))));
}
