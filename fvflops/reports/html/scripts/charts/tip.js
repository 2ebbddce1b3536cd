// The box that shows at once what a cell is; screen readers are told by the live region.
import { byId, isolate, make } from "../base/elements.js";

const GAP = 6; // px

/** Show lines below an element, or above it where there is no room. */
export function showTip(element, lines) {
  const tip = byId("tip");
  tip.replaceChildren(...lines.map((line, index) => make("div", { class: index ? undefined : "tip-name" }, isolate(line.slice(0, 300)))));
  tip.hidden = false;
  const { left, right, top, bottom } = element.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const centre = (Math.max(left, 0) + Math.min(right, window.innerWidth)) / 2;
  tip.style.left = `${Math.max(GAP, Math.min(centre - width / 2, document.documentElement.clientWidth - width - GAP))}px`;
  tip.style.top = `${bottom + GAP + height <= window.innerHeight ? bottom + GAP : Math.max(GAP, top - GAP - height)}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
