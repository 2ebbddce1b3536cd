// Allocated memory after each op of a run, by kind.
import { isolate, make } from "../base/elements.js";
import { plural, short, thousands } from "../base/numbers.js";
import { makeSvg } from "../base/svg.js";
import { ticks } from "../data/calls.js";
import { totalsOf } from "../data/findings.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 300;
const LEFT = 64;
const BOTTOM = 24;
const TOP = 18;
const KIND_COLOURS = { parameter: 0, buffer: 7, input: 5, gradient: 3, "optimizer state": 4, activation: 1, temporary: 2, communication: 8, workspace: 6, allocated: 0 };

/** Return the parts of a run by phase: {phase, from, to}, as numbers of points; recompute is part of the backward pass. */
export function phaseParts({ phase, phases }) {
  const parts = [];
  phase.forEach((index, point) => {
    const name = phases[index] === "recompute" ? "backward" : phases[index];
    const last = parts[parts.length - 1];
    if (last && last.phase === name) last.to = point + 1;
    else parts.push({ phase: name, from: point, to: point + 1 });
  });
  return parts;
}

export class MemoryChart {
  /** `onSelect` is called with the module of a selected point, and what a screen reader is told of it. */
  constructor(report, onSelect) {
    Object.assign(this, { report, onSelect, memory: report.record.memory });
    this.totals = totalsOf(this.memory);
    this.peak = this.totals.reduce((best, value, point) => (value > this.totals[best] ? point : best), 0);
    this.point = this.peak;
    this.box = make("div", {
      class: "chart",
      tabindex: "0",
      role: "slider",
      "aria-label": "Memory after each op",
      "aria-valuemin": "1",
      "aria-valuemax": this.totals.length,
      on: {
        keydown: (event) => this.onKey(event),
        pointermove: (event) => this.onPointer(event),
        pointerleave: () => hideTip(),
        blur: () => hideTip(),
      },
    });
    this.legend = make("div", { class: "legend" });
    this.hint = make("p", { class: "hint" });
    this.element = make("div", {}, this.box, this.legend, this.hint);
  }

  draw() {
    const { memory, totals, peak } = this;
    this.width = Math.max(this.box.clientWidth || 1000, 240);
    const svg = makeSvg("svg", { width: this.width, height: HEIGHT, viewBox: `0 0 ${this.width} ${HEIGHT}`, "aria-hidden": "true" });
    this.most = Math.max(...totals, 1);
    svg.append(...this.drawPhases(), ...this.drawAxis(), ...this.drawLayers());
    const [x, y] = [this.x(peak + 0.5), this.y(totals[peak])];
    const atRight = x > this.width - 140;
    svg.append(makeSvg("circle", { cx: x, cy: y, r: 3.5, class: "peak" }), makeSvg("text", { x: x + (atRight ? -8 : 8), y: Math.max(y - 5, 11), class: "peak-label", "text-anchor": atRight ? "end" : "start" }, `peak ${short(totals[peak], "B")}`));
    this.cursor = makeSvg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    svg.append(this.cursor);
    this.box.replaceChildren(svg);
    const swatch = (name) => make("span", { class: "swatch" }, make("i", { style: { background: colourOf(name) } }), isolate(name));
    this.legend.replaceChildren(...(memory.layers.length > 1 ? memory.layers.map(([name]) => swatch(name)) : []));
    const sampled = totals.length < memory.ops ? `, the highest of each part shown as ${plural(totals.length, "point")}` : "";
    this.hint.textContent = `${memory.measured ? "Measured" : "Predicted"} after each of ${plural(memory.ops, "op")}${sampled}. ${this.describe(peak)}`;
    this.box.setAttribute("aria-valuenow", this.point + 1);
    this.box.setAttribute("aria-valuetext", this.describe(this.point));
  }

  x(point) {
    return LEFT + (point * (this.width - LEFT - 8)) / this.totals.length;
  }

  y(value) {
    return HEIGHT - BOTTOM - (value * (HEIGHT - BOTTOM - TOP)) / this.most;
  }

  drawPhases() {
    return phaseParts(this.memory).flatMap(({ phase, from, to }, index) => {
      const width = this.x(to) - this.x(from);
      return [
        makeSvg("rect", { x: this.x(from), y: TOP, width, height: HEIGHT - BOTTOM - TOP, class: index % 2 ? "band odd" : "band" }),
        width > phase.length * 7 ? makeSvg("text", { x: this.x(from) + width / 2, y: HEIGHT - 8, "text-anchor": "middle" }, phase) : null,
      ].filter(Boolean);
    });
  }

  drawAxis() {
    return ticks(0, this.most, 4).flatMap((value) => [
      makeSvg("line", { x1: LEFT, x2: this.width - 8, y1: this.y(value), y2: this.y(value), class: "grid" }),
      makeSvg("text", { x: LEFT - 6, y: this.y(value) + 4, "text-anchor": "end" }, short(value, "B")),
    ]);
  }

  /** Return an area for each kind, on top of those before it. */
  drawLayers() {
    const below = this.totals.map(() => 0);
    return this.memory.layers.map(([name, values]) => {
      const upper = values.map((value, point) => `${this.x(point).toFixed(1)},${this.y(below[point] + value).toFixed(1)} ${this.x(point + 1).toFixed(1)},${this.y(below[point] + value).toFixed(1)}`);
      const lower = values.map((_, point) => `${this.x(point + 1).toFixed(1)},${this.y(below[point]).toFixed(1)} ${this.x(point).toFixed(1)},${this.y(below[point]).toFixed(1)}`).reverse();
      values.forEach((value, point) => (below[point] += value));
      const area = makeSvg("polygon", { points: [...upper, ...lower].join(" "), class: "area" });
      area.style.fill = colourOf(name);
      return area;
    });
  }

  describe(point) {
    const { memory, report } = this;
    const path = report.path(memory.module[point]) || report.title;
    return `${short(this.totals[point], "B")} at op ${thousands(memory.at[point] + 1)}, ${memory.labels[memory.label[point]]} of ${path}, ${memory.phases[memory.phase[point]]}.`;
  }

  tipOf(point) {
    const kinds = this.memory.layers.length > 1 ? this.memory.layers.filter(([, values]) => values[point]).map(([name, values]) => `${name} ${short(values[point], "B")}`) : [];
    return [this.describe(point), ...kinds.reverse()];
  }

  move(point) {
    this.point = Math.min(Math.max(point, 0), this.totals.length - 1);
    const x = this.x(this.point + 0.5);
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, x);
    this.cursor.setAttribute("visibility", "visible");
    this.box.setAttribute("aria-valuenow", this.point + 1);
    this.box.setAttribute("aria-valuetext", this.describe(this.point));
    showTip(this.cursor, this.tipOf(this.point));
  }

  onPointer(event) {
    const { left } = this.box.getBoundingClientRect();
    this.move(Math.floor(((event.clientX - left - LEFT) / (this.width - LEFT - 8)) * this.totals.length));
  }

  onKey(event) {
    const page = Math.ceil(this.totals.length / 20);
    const point = { ArrowLeft: this.point - 1, ArrowRight: this.point + 1, PageUp: this.point + page, PageDown: this.point - page, Home: 0, End: this.totals.length - 1 }[event.key];
    if (event.key === "Enter") this.onSelect(this.memory.module[this.point], this.describe(this.point));
    if (point === undefined) return;
    event.preventDefault();
    this.move(point);
  }
}

const colourOf = (kind) => `var(--c${KIND_COLOURS[kind] ?? 9})`;
