// The calls of a timed run over time: modules, and inside of them their submodules and ops.
import { isolate, make } from "../base/elements.js";
import { percent, plural, short, thousands } from "../base/numbers.js";
import { Calls, ticks } from "../data/calls.js";
import { view } from "../data/view.js";
import { callColour } from "./colours.js";
import { fits } from "./layout.js";
import { hideTip, showTip } from "./tip.js";

const ROW = 22; // px
const AXIS = 20; // px
const ZOOM = 1.25; // of one step of the wheel
const SHORTEST = 100; // ns, the shortest interval

export class Timeline {
  /** `onSelect` is called with the module of a selected call, and what a screen reader is told of it. */
  constructor(report, onSelect) {
    this.report = report;
    this.onSelect = onSelect;
    this.calls = new Calls(report);
    this.from = 0;
    this.to = this.calls.end || 1;
    this.selected = -1;
    this.zoomed = -1; // the call whose interval is shown
    this.box = make("div", {
      class: "icicle timeline",
      role: "tree",
      tabindex: "0",
      "aria-label": "Calls over time: width is the time",
      on: {
        click: (event) => this.onClick(event),
        keydown: (event) => this.onKey(event),
        wheel: (event) => this.onWheel(event),
        pointerdown: (event) => this.onGrab(event),
        pointermove: (event) => this.onDrag(event),
        pointerup: () => (this.grabbed = null),
        pointerover: (event) => this.onPointer(event),
        pointerleave: () => hideTip(),
        blur: () => hideTip(),
      },
    });
    this.hint = make("p", { class: "hint" });
    this.element = make("div", {}, this.box, this.hint);
  }

  draw() {
    const { calls } = this;
    const width = this.box.clientWidth || 1000;
    const colour = callColour(this.report, calls);
    const cells = calls.visible(this.from, this.to, width).map((cell) => this.drawCell(cell, width, colour));
    const axis = ticks(this.from, this.to, Math.max(2, width / 110)).map((at) =>
      make("div", { class: "tick", "aria-hidden": "true", style: { left: `${(100 * (at - this.from)) / (this.to - this.from)}%` } }, short(at, "ns")),
    );
    this.box.replaceChildren(...axis, ...cells);
    this.box.style.height = `${AXIS + calls.rows * ROW}px`;
    const hidden = calls.hidden ? `, the ${plural(calls.hidden, "shortest call")} omitted` : "";
    const tracks = calls.tracks.length > 1 ? ` ${calls.tracks.join(", ")}, from top to bottom.` : "";
    this.hint.textContent = `${plural(calls.size, "call")} of an instrumented run${hidden}; ${short(this.to - this.from, "ns")} of ${short(calls.end, "ns")} shown. Click a call to zoom, Esc to zoom out; the wheel with Ctrl zooms, dragging moves.${tracks}`;
    this.markSelected();
  }

  drawCell({ call, row, x, w, count }, width, colour) {
    const { calls } = this;
    const pixels = w * width;
    const name = count > 1 ? `${thousands(count)} calls` : calls.nameOf(call);
    const dim = (view.phase && calls.phaseOf(call) !== view.phase) || (view.operator && calls.nameOf(call) !== view.operator);
    const cell = make(
      "div",
      {
        class: `cell ${calls.isModule(call) ? "module" : "op"}${pixels < 8 ? " thin" : ""}${pixels <= 60 ? " narrow" : ""}${dim ? " dim" : ""}`,
        role: "treeitem",
        id: `call-${call}`,
        "aria-level": calls.depth[call] + 1,
        "aria-label": this.describe(call),
        style: { left: `${(100 * x).toFixed(4)}%`, width: `${(100 * w).toFixed(4)}%`, top: `${AXIS + row * ROW}px`, height: `${ROW}px`, background: count > 1 ? "var(--c11)" : colour(call) },
      },
      ...(fits(name, pixels) && pixels > 14 ? [isolate(name.slice(0, 200), { class: "label" })] : []),
      ...(pixels > 120 && count === 1 ? [make("span", { class: "share" }, short(calls.duration[call], "ns"))] : []),
    );
    cell.call = call;
    cell.count = count;
    return cell;
  }

  describe(call) {
    const { calls, report } = this;
    const path = report.path(calls.module[call]) || report.title;
    const name = calls.isModule(call) ? path : `${calls.nameOf(call)} of ${path}`;
    return `${name}, ${calls.phaseOf(call)}, ${short(calls.duration[call], "ns")}, ${percent(calls.duration[call], calls.end)} of the run`;
  }

  tipOf(call, count) {
    const { calls, report } = this;
    const path = report.path(calls.module[call]) || report.title;
    if (count > 1) return [plural(count, "short call"), "Zoom in to see each"];
    const lines = calls.isModule(call) ? [path, report.classOf(calls.module[call])] : [calls.nameOf(call), `of ${path}`];
    return [...lines, `${calls.phaseOf(call)}: ${short(calls.duration[call], "ns")} from ${short(calls.start[call], "ns")} on · ${percent(calls.duration[call], calls.end)} of the run`];
  }

  show(from, to) {
    const length = Math.min(Math.max(to - from, SHORTEST), this.calls.end);
    this.from = Math.min(Math.max(from, 0), this.calls.end - length);
    this.to = this.from + length;
    hideTip();
    this.draw();
  }

  /** Show the interval of a call, -1 for the whole run. */
  zoom(call) {
    this.zoomed = call;
    if (call < 0) this.show(0, this.calls.end);
    else this.show(this.calls.start[call], this.calls.start[call] + this.calls.duration[call]);
  }

  zoomOut() {
    this.zoom(this.zoomed < 0 ? -1 : this.calls.parent[this.zoomed]);
  }

  select(call) {
    if (call === undefined || call < 0) return;
    this.selected = call;
    const { start, duration } = this.calls;
    if (start[call] + duration[call] <= this.from || start[call] >= this.to) this.show(start[call] - (this.to - this.from) / 2, start[call] + (this.to - this.from) / 2);
    this.markSelected();
    this.onSelect(this.calls.module[call], this.describe(call));
  }

  markSelected() {
    this.box.querySelector(".selected")?.classList.remove("selected");
    const cell = [...this.box.children].find((item) => item.call === this.selected);
    if (!cell) {
      this.box.removeAttribute("aria-activedescendant");
      return;
    }
    cell.classList.add("selected");
    this.box.setAttribute("aria-activedescendant", cell.id);
    if (this.box === document.activeElement) showTip(cell, this.tipOf(cell.call, cell.count));
  }

  onClick(event) {
    const cell = event.target.closest(".cell");
    if (!cell || this.moved) return;
    this.box.focus({ preventScroll: true });
    if (cell.call === this.zoomed) this.zoomOut();
    else this.zoom(cell.call);
    this.select(cell.call);
  }

  onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const step = {
      ArrowLeft: () => this.select(this.sibling(-1)),
      ArrowRight: () => this.select(this.selected < 0 ? 0 : this.sibling(1)),
      ArrowDown: () => this.select(this.selected < 0 ? 0 : this.calls.parent.indexOf(this.selected)),
      ArrowUp: () => this.select(this.calls.parent[this.selected]),
      Enter: () => this.zoom(this.selected),
      " ": () => this.zoom(this.selected),
      Escape: () => this.zoomOut(),
      Backspace: () => this.zoomOut(),
      Home: () => this.zoom(-1),
      "+": () => this.scale(0.5, 1 / ZOOM),
      "-": () => this.scale(0.5, ZOOM),
    }[event.key];
    if (!step) return;
    event.preventDefault();
    step();
  }

  /** Return the next call of the row, or the previous one. */
  sibling(by) {
    const { calls, selected } = this;
    for (let i = selected + by; i >= 0 && i < calls.size; i += by) if (calls.rowOf(i) === calls.rowOf(selected)) return i;
    return -1;
  }

  scale(at, factor) {
    const centre = this.from + at * (this.to - this.from);
    this.zoomed = factor > 1 && (this.to - this.from) * factor >= this.calls.end ? -1 : this.zoomed;
    this.show(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor);
  }

  onWheel(event) {
    if (!event.ctrlKey) return; // the wheel alone scrolls the page
    event.preventDefault();
    const { left, width } = this.box.getBoundingClientRect();
    this.scale((event.clientX - left) / width, event.deltaY > 0 ? ZOOM : 1 / ZOOM);
  }

  onGrab(event) {
    this.moved = false;
    this.grabbed = { x: event.clientX, from: this.from };
  }

  onDrag(event) {
    if (!this.grabbed || !(event.buttons & 1)) return;
    const by = event.clientX - this.grabbed.x;
    if (Math.abs(by) < 4 && !this.moved) return;
    this.moved = true;
    const length = this.to - this.from;
    const from = this.grabbed.from - (by / this.box.clientWidth) * length;
    this.show(from, from + length);
  }

  onPointer(event) {
    const cell = event.target.closest(".cell");
    if (cell && !this.grabbed) showTip(cell, this.tipOf(cell.call, cell.count));
    else hideTip();
  }
}
