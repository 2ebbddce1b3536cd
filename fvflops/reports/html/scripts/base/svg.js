// Make elements of an SVG picture.
import { byId } from "./elements.js";

export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(byId("svg").namespaceURI, tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
