// Files of what is seen: the chosen view as SVG, a table as CSV.
import { byId, make } from "../base/elements.js";
import { makeSvg } from "../base/svg.js";
import { reports } from "../data/view.js";
import { chosenBox, chosenView } from "./views.js";

const GAP = 12; // px between the plots of a comparison
const LETTER = 7; // px
const PAINTED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "text-anchor"];
const STOP = /((?:rgba?|color|oklab|oklch|lab)\([^()]*\))\s+([\d.]+)%\s+([\d.]+)%/g;

const canvas = document.createElement("canvas");
canvas.width = canvas.height = 1;

/** Return a colour that any SVG viewer knows, "none" for a transparent one. */
function plainColour(colour) {
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.clearRect(0, 0, 1, 1);
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = context.getImageData(0, 0, 1, 1).data;
  return alpha ? `#${[red, green, blue].map((part) => part.toString(16).padStart(2, "0")).join("")}` : "none";
}

/** Return the boxes of the chosen view as one SVG picture. */
export function drawSvg(boxes) {
  const frames = boxes.map((box) => box.getBoundingClientRect());
  const width = Math.ceil(Math.max(...frames.map((frame) => frame.width)));
  const height = Math.ceil(frames.reduce((sum, frame) => sum + frame.height + GAP, -GAP));
  const page = getComputedStyle(document.querySelector(".card"));
  const svg = makeSvg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, makeSvg("rect", { width, height, fill: plainColour(page.backgroundColor) }));
  let top = 0;
  boxes.forEach((box, index) => {
    const inside = box.querySelector("svg");
    svg.append(makeSvg("g", { transform: `translate(0 ${top})` }, ...(inside ? copyChart(inside) : copyCells(box, frames[index]))));
    top += frames[index].height + GAP;
  });
  return new XMLSerializer().serializeToString(svg);
}

/** Copy an SVG chart with its colours, which are a style sheet's. */
function copyChart(chart) {
  return [...chart.children].map((element) => {
    const copy = element.cloneNode(true);
    copy.removeAttribute("class");
    copy.removeAttribute("style");
    const style = getComputedStyle(element);
    for (const name of PAINTED) {
      const value = style.getPropertyValue(name);
      copy.setAttribute(name, (name === "fill" || name === "stroke") && value !== "none" ? plainColour(value) : value);
    }
    return copy;
  });
}

/** Draw the cells of a plot as rectangles with names. */
function copyCells(box, frame) {
  return [...box.querySelectorAll(".cell, .tick")].flatMap((cell) => {
    const { left, top, width, height } = cell.getBoundingClientRect();
    const [x, y] = [left - frame.left, top - frame.top];
    const style = getComputedStyle(cell);
    const stops = [...style.backgroundImage.matchAll(STOP)];
    const isStriped = style.backgroundImage.startsWith("linear-gradient") && stops.length;
    const parts = isStriped ? stops.map(([, colour, from, to]) => [colour, from / 100, to / 100]) : [[style.backgroundColor, 0, 1]];
    const stroke = plainColour(style.borderRightColor);
    const rects = parts.map(([colour, from, to]) => makeSvg("rect", { x: x + from * width, y, width: (to - from) * width, height, fill: plainColour(colour), stroke: isStriped ? null : stroke, "stroke-width": 0.5 }));
    return [...rects, ...copyTexts(cell, style, { x, y, width, height })];
  });
}

function copyTexts(cell, style, { x, y, width, height }) {
  const colour = plainColour(style.color);
  const [label, share] = [".label", ".share"].map((selector) => cell.querySelector(selector)?.textContent);
  const attributes = { fill: colour, "font-family": "monospace", "font-size": 11 };
  if (cell.classList.contains("tick")) return [makeSvg("text", { ...attributes, x, y: y + 12 }, cell.textContent)];
  if (!label) return [];
  if (cell.classList.contains("rotated")) return [makeSvg("text", { ...attributes, transform: `translate(${x + width / 2 - 4} ${y + 6}) rotate(90)` }, label.slice(0, Math.floor(height / LETTER)))];
  const room = Math.max(1, Math.floor((width - 8 - (share ? share.length * LETTER : 0)) / LETTER));
  const texts = [makeSvg("text", { ...attributes, x: x + 6, y: y + height / 2 + 4 }, label.length > room ? `${label.slice(0, room - 1)}…` : label)];
  if (share) texts.push(makeSvg("text", { ...attributes, x: x + width - 6, y: y + height / 2 + 4, "text-anchor": "end", opacity: 0.72 }, share));
  return texts;
}

/** Save a text as a file. */
export function save(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}

const nameOf = (part, ending) => `${reports[0].title.replace(/[^\w.-]+/g, "_").slice(0, 60)}-${part}.${ending}`;

/** Listen to the buttons that save the chosen view and the tables. */
export function listenToExports(tables) {
  byId("save-view").addEventListener("click", () => save(drawSvg(chosenBox()), nameOf(chosenView(), "svg"), "image/svg+xml"));
  for (const button of document.querySelectorAll("[data-save]")) {
    button.addEventListener("click", () => save(tables[button.dataset.save].toCsv(), nameOf(button.dataset.save, "csv"), "text/csv"));
  }
}
