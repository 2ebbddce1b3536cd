// What costs most, in words.
import { byId, isolate, make } from "../base/elements.js";
import { findCosts } from "../data/findings.js";
import { reports } from "../data/view.js";
import { pictures } from "./pictures.js";

export function drawTopCosts() {
  const [picture] = pictures;
  const sentences = findCosts(reports[0], picture.nodes);
  const link = (node) => make("button", { type: "button", class: "link", title: node.path, on: { click: () => picture.zoom(node) } }, isolate((node.path || "the whole model").slice(-80)));
  byId("top-costs").hidden = !sentences.length;
  byId("top-costs-list").replaceChildren(...sentences.map((parts) => make("li", {}, ...parts.map((part) => (typeof part === "string" ? isolate(part) : link(part))))));
}
