// Attained FLOP/s of each operator over its FLOPs per byte, under the roofs of a device where they are known.
import { make } from "../base/elements.js";
import { percent, plural, short } from "../base/numbers.js";
import { makeSvg } from "../base/svg.js";
import { view } from "../data/view.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 380;
const [LEFT, RIGHT, TOP, BOTTOM] = [86, 16, 16, 40];
const LABELS = 14;
const LETTER = 6.6;
const LINE = 13; // px
const BETWEEN_OPS = "(between ops)";

/** Return {name, flops, bytes, time, x, y} of each operator with all three, the longest time first; a MAC is 2 FLOPs. */
export function findPoints(report) {
  const sums = (key) => new Map(report.measures.has(key) ? report.shares(key, view, [0], "operator") : []);
  const [flops, macs, bytes, time] = ["flops", "macs", "bytes", "time"].map(sums);
  const missing = 2 - Number(report.record.about.multiply_add || 1);
  return [...time]
    .filter(([name]) => name !== BETWEEN_OPS)
    .map(([name, ns]) => ({ name, time: ns, bytes: bytes.get(name) || 0, flops: (flops.get(name) || 0) + missing * (macs.get(name) || 0) }))
    .filter((point) => point.flops && point.bytes && point.time)
    .map((point) => ({ ...point, x: point.flops / point.bytes, y: (point.flops * 1e9) / point.time }));
}

export class Roofline {
  constructor(report) {
    this.report = report;
    this.box = make("div", { class: "chart", role: "img", on: { pointerover: (event) => this.onPointer(event), pointerleave: () => hideTip() } });
    this.hint = make("p", { class: "hint" });
    this.element = make("div", {}, this.box, this.hint);
  }

  draw() {
    const { peaks } = this.report.record;
    this.points = findPoints(this.report);
    this.width = Math.max(this.box.clientWidth || 1000, 260);
    const roofs = peaks ? Object.entries(peaks.flops) : [];
    this.setScales(roofs, peaks);
    const svg = makeSvg("svg", { width: this.width, height: HEIGHT, viewBox: `0 0 ${this.width} ${HEIGHT}`, "aria-hidden": "true" });
    svg.append(...this.drawAxes(), ...this.drawRoofs(roofs, peaks), ...this.drawPoints());
    this.box.replaceChildren(svg);
    const listed = this.points.slice(0, 6).map(({ name, x, y }) => `${name}: ${short(y, "FLOP/s")} at ${short(x)} FLOP/byte`);
    this.box.setAttribute("aria-label", `Attained FLOP/s over arithmetic intensity. ${listed.join("; ")}`);
    const device = peaks ? `Roofs: ${peaks.device}.` : "The peaks of this device are not known: name one with --peaks to see its roofs.";
    this.hint.textContent = `${plural(this.points.length, "operator")} by measured FLOP/s (a multiply-add is 2 FLOPs) and FLOPs per byte of memory traffic, without cache reuse or fusion; area: time. ${device}`;
  }

  setScales(roofs, peaks) {
    const xs = this.points.map(({ x }) => x);
    const ys = this.points.map(({ y }) => y);
    if (!xs.length) {
      xs.push(1);
      ys.push(1);
    }
    for (const [, peak] of roofs) {
      xs.push((peak / peaks.bandwidth) * 4);
      ys.push(peak);
    }
    const rangeOf = (values) => [Math.log10(Math.min(...values)) - 0.3, Math.log10(Math.max(...values)) + 0.4];
    [this.x0, this.x1] = rangeOf(xs);
    [this.y0, this.y1] = rangeOf(ys);
    this.y1 += roofs.length > 1 ? 0.5 : 0; // for their labels
  }

  x(value) {
    return LEFT + ((Math.log10(value) - this.x0) * (this.width - LEFT - RIGHT)) / (this.x1 - this.x0);
  }

  y(value) {
    return HEIGHT - BOTTOM - ((Math.log10(value) - this.y0) * (HEIGHT - BOTTOM - TOP)) / (this.y1 - this.y0);
  }

  drawAxes() {
    const powers = (from, to, most) => {
      const step = Math.max(1, Math.ceil((to - from) / most));
      const all = [];
      for (let power = Math.ceil(from); power <= to; power += step) all.push(10 ** power);
      return all;
    };
    return [
      ...powers(this.x0, this.x1, 8).flatMap((value) => [
        makeSvg("line", { x1: this.x(value), x2: this.x(value), y1: TOP, y2: HEIGHT - BOTTOM, class: "grid" }),
        makeSvg("text", { x: this.x(value), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, value < 1 ? String(Number(value.toPrecision(1))) : short(value)),
      ]),
      ...powers(this.y0, this.y1, 6).flatMap((value) => [
        makeSvg("line", { x1: LEFT, x2: this.width - RIGHT, y1: this.y(value), y2: this.y(value), class: "grid" }),
        makeSvg("text", { x: LEFT - 6, y: this.y(value) + 4, "text-anchor": "end" }, short(value, "FLOP/s")),
      ]),
      makeSvg("text", { x: this.width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, "FLOP/byte"),
    ];
  }

  drawRoofs(roofs, peaks) {
    if (!roofs.length) return [];
    const highest = Math.max(...roofs.map(([, peak]) => peak));
    const left = 10 ** this.x0;
    const bottom = 10 ** this.y0;
    const from = Math.max(left, bottom / peaks.bandwidth);
    const [x, y] = [this.x(from), this.y(from * peaks.bandwidth)];
    const slope = makeSvg("line", { x1: x, y1: y, x2: this.x(highest / peaks.bandwidth), y2: this.y(highest), class: "roof" });
    const isAtBottom = y + LINE + 4 > HEIGHT - BOTTOM;
    return [
      slope,
      makeSvg("text", { x: x + (isAtBottom ? 3 * LINE : 6), y: isAtBottom ? y - 4 : y + LINE + 2, class: "roof-label" }, `memory: ${short(peaks.bandwidth, "B/s")}`),
      ...this.drawPeaks(roofs, peaks),
    ];
  }

  /** Return a line for each peak, the highest first, with its dtypes; labels of near lines are above all of these. */
  drawPeaks(roofs, peaks) {
    const dtypes = new Map();
    for (const [dtype, peak] of roofs) dtypes.set(peak, [...(dtypes.get(peak) || []), dtype]);
    const groups = [];
    for (const [peak, names] of [...dtypes].sort(([a], [b]) => b - a)) {
      const roof = { peak, y: this.y(peak), label: `${names.join(", ")} ${short(peak, "FLOP/s")}` };
      const last = groups.at(-1);
      if (last && roof.y - last.at(-1).y < LINE + 4) last.push(roof);
      else groups.push([roof]);
    }
    return groups.flatMap((group) => group.flatMap(({ peak, y, label }, index) => [
      makeSvg("line", { x1: this.x(peak / peaks.bandwidth), x2: this.width - RIGHT, y1: y, y2: y, class: "roof" }),
      makeSvg("text", { x: this.width - RIGHT, y: group[0].y - 4 - (group.length - 1 - index) * LINE, "text-anchor": "end", class: "roof-label" }, label),
    ]));
  }

  drawPoints() {
    const all = this.points.reduce((sum, { time }) => sum + time, 0);
    const circles = this.points.map((point, index) => {
      point.r = 4 + 14 * Math.sqrt(point.time / all);
      point.share = percent(point.time, all);
      const circle = makeSvg("circle", { cx: this.x(point.x), cy: this.y(point.y), r: point.r, class: "point" });
      circle.style.fill = `var(--c${Math.min(index, 11)})`;
      circle.point = point;
      return circle;
    });
    return [...circles.reverse(), ...this.drawLabels()];
  }

  /** Return names beside points, the longest time first, where they hide no other name. */
  drawLabels() {
    const taken = [];
    const labels = [];
    for (const { name, x, y, r } of this.points.slice(0, LABELS)) {
      const width = name.length * LETTER;
      const [cx, cy] = [this.x(x), this.y(y)];
      const places = [[cx + r + 4, cy + 4], [cx - r - 4 - width, cy + 4], [cx - width / 2, cy - r - 5], [cx - width / 2, cy + r + 13]];
      const free = places.find(([left, base]) => left >= LEFT && left + width <= this.width - 2 && !taken.some(([l, b, w]) => left < l + w && l < left + width && Math.abs(base - b) < 12));
      if (!free) continue;
      taken.push([...free, width]);
      labels.push(makeSvg("text", { x: free[0], y: free[1], class: "point-label" }, name.slice(0, 60)));
    }
    return labels;
  }

  onPointer(event) {
    const { point } = event.target;
    if (!point) {
      hideTip();
      return;
    }
    showTip(event.target, [point.name, `${short(point.y, "FLOP/s")} at ${short(point.x)} FLOP/byte`, `${short(point.time, "ns")} · ${point.share} of the time of ops`, `${short(point.flops)} FLOPs, ${short(point.bytes, "B")}`]);
  }
}
