// The plot of the module tree: each module is a cell whose width is its value.
import { isolate, make } from "../base/elements.js";
import { percent, plural, short } from "../base/numbers.js";
import { ModuleNodes } from "../data/module_nodes.js";
import { formatValue, isRate, measureOf, moduleValue, titleOf, unsupportedOf, valueOf, view, widthKey } from "../data/view.js";
import { paint } from "./colours.js";
import { fits, isRotated, layOut, layOutRows } from "./layout.js";
import { hideTip, showTip } from "./tip.js";

export class Icicle {
  /** `onSelect` is called with the plot and whether the selection is to be announced, `onZoom` with the plot. */
  constructor(report, number, { onSelect, onZoom }) {
    Object.assign(this, { report, number, onSelect, onZoom });
    this.nodes = new ModuleNodes(report);
    this.zoomed = this.selected = this.nodes.root;
    this.cells = new Map(); // key → its element
    this.drawnNodes = new Map(); // key → node
    this.levels = [];
    this.heading = make("h3", { class: "picture-title", hidden: true }, isolate(""));
    this.box = make("div", {
      class: "icicle",
      role: "tree",
      tabindex: "0",
      "aria-label": "Module tree: width is the chosen measure",
      on: {
        keydown: (event) => this.onKey(event),
        click: (event) => this.onClick(event),
        pointerover: (event) => this.onPointer(event),
        pointerleave: () => hideTip(),
        blur: () => hideTip(),
      },
    });
    this.element = make("div", {}, this.heading, this.box);
  }

  draw() {
    if (!this.report.measures.has(widthKey())) return; // of a comparison, the other report may lack the measure
    const width = this.box.clientWidth || 1000;
    this.layout = layOut(this.nodes, this.zoomed, this.report.totals(widthKey(), view), width);
    this.rows = layOutRows(this.layout, width);
    const context = { width, paints: paint(this.report), hits: this.report.search(view.query) };
    const fresh = document.createDocumentFragment();
    const seen = new Set();
    this.drawnNodes.clear();
    this.levels = [];
    for (const cell of this.layout) {
      const key = `${cell.kind}${cell.node.key}`;
      seen.add(key);
      let element = this.cells.get(key);
      if (!element) {
        element = make("div", { class: `cell ${cell.kind}` });
        this.cells.set(key, element);
        fresh.append(element);
      }
      this.place(element, cell);
      if (cell.kind === "module") {
        this.drawnNodes.set(cell.node.key, cell.node);
        (this.levels[cell.depth] ||= []).push(cell);
        this.fill(element, cell, context);
      } else this.fillSmall(element, cell, context);
    }
    for (const level of this.levels) level.sort((a, b) => a.x - b.x);
    for (const [key, element] of this.cells) {
      if (seen.has(key)) continue;
      element.remove();
      this.cells.delete(key);
    }
    this.box.append(fresh);
    this.orderForReaders();
    const last = this.rows[this.rows.length - 1];
    this.box.style.height = `${last.top + last.height}px`;
    this.box.classList.toggle("empty", !this.zoomed.sum(this.report.totals(widthKey(), view).total));
    this.markSelected();
  }

  place(element, { kind, node, depth, x, w }) {
    const { top, height } = this.rows[depth];
    element.shown = { kind, node };
    Object.assign(element.style, { left: `${(x * 100).toFixed(4)}%`, width: `${(w * 100).toFixed(4)}%`, top: `${top}px`, height: `${height}px` });
  }

  /** Give screen readers the order of the tree: cells keep their DOM position so that they can be animated. */
  orderForReaders() {
    const inside = new Set();
    for (const level of this.levels) for (const { node } of level) if (node.parent) inside.add(node.parent.key);
    for (const level of this.levels) {
      for (const { node } of level) {
        if (this.report.children[node.first].length || node.run > 1) this.cells.get(`module${node.key}`).setAttribute("aria-expanded", String(inside.has(node.key)));
      }
    }
    const order = this.levels.flat().sort((a, b) => a.node.first - b.node.first || a.depth - b.depth);
    this.box.setAttribute("aria-owns", order.map(({ node }) => this.idOf(node)).join(" "));
  }

  idOf(node) {
    return `cell-${this.number}-${node.key}`;
  }

  fill(cell, { node, depth, w }, { width, paints, hits }) {
    const pixels = w * width;
    const share = percent(valueOf(this.report, widthKey(), node.members), moduleValue(this.report, widthKey(), 0));
    const text = formatValue(this.report, view.measure, node.members);
    cell.id = this.idOf(node);
    cell.setAttribute("role", "treeitem");
    cell.setAttribute("aria-level", depth + 1);
    cell.setAttribute("aria-label", this.describe(node));
    cell.dataset.path = node.path || this.report.title;
    cell.style.background = paints.of(node);
    this.mark(cell, hits, node);
    const parts = [];
    const name = node.label.slice(0, 200);
    const rotated = isRotated(this.rows[depth], node.label, pixels);
    if (rotated || fits(name, pixels)) parts.push(isolate(name, { class: "label" }));
    cell.classList.toggle("thin", pixels < 8);
    cell.classList.toggle("narrow", pixels <= 60);
    cell.classList.toggle("rotated", rotated);
    cell.classList.toggle("run", node.run > 1);
    if (pixels > (isRate() ? 140 : 90)) parts.push(make("span", { class: "share" }, isRate() ? text : pixels > 190 ? `${text} · ${share}` : share));
    cell.replaceChildren(...parts);
  }

  fillSmall(cell, { kind, node, w, count }, { width, paints, hits }) {
    const pixels = w * width;
    cell.setAttribute("aria-hidden", "true");
    if (kind === "own") {
      cell.style.background = paints.ofOwn(node);
      cell.replaceChildren(...(pixels > 40 ? [make("span", { class: "label" }, "itself")] : []));
    } else {
      const colour = paints.of(node);
      cell.style.setProperty("--tint", colour.startsWith("linear") || !colour ? "var(--cell-none)" : colour);
      cell.replaceChildren(...(pixels > 60 ? [make("span", { class: "label" }, `${count} more`)] : []));
    }
    cell.dataset.count = count;
    this.mark(cell, hits, node);
  }

  mark(cell, hits, node) {
    const any = (bits) => node.members.some((module) => hits[module] & bits);
    cell.classList.toggle("hit", Boolean(hits && cell.classList.contains("module") && any(1)));
    cell.classList.toggle("dim", Boolean(hits && !any(3)));
  }

  /** Return what a screen reader is told of a node. */
  describe(node) {
    const { report } = this;
    const share = percent(valueOf(report, widthKey(), node.members), moduleValue(report, widthKey(), 0));
    const name = node.path.slice(-300) || "the whole model";
    const several = node.count > 1 ? `${plural(node.count, "equal module")}, ` : "";
    return `${name}, ${several}${report.classOf(node.first).slice(0, 200)}, ${titleOf(view.measure)} ${formatValue(report, view.measure, node.members)}, ${share} of the model`;
  }

  /** Return the lines of a cell's tip. */
  tipOf({ kind, node }, count) {
    const { report } = this;
    if (kind === "rest") return [`${plural(Number(count), "module")} too narrow to draw`, "Click to zoom in"];
    const name = node.path || report.title;
    if (kind === "own") return [`${name}: without its submodules`, short(node.sum(report.totals(widthKey(), view).own), measureOf(report).unit)];
    const share = percent(valueOf(report, widthKey(), node.members), moduleValue(report, widthKey(), 0));
    const lines = [name, `${report.classOf(node.first) || "no class"}${node.count > 1 ? ` × ${node.count}` : ""}`, `${titleOf(view.measure)} ${formatValue(report, view.measure, node.members)} · ${share} of the model`];
    if (node.count > 1 && !isRate()) lines.push(`${short(valueOf(report, widthKey(), node.members) / node.count, measureOf(report).unit)} each`);
    if (unsupportedOf(report, widthKey(), node.members)) lines.push(`${plural(unsupportedOf(report, widthKey(), node.members), "unsupported op call")}: a lower bound`);
    return lines;
  }

  onPointer(event) {
    const cell = event.target.closest(".cell");
    if (cell) showTip(cell, this.tipOf(cell.shown, cell.dataset.count));
    else hideTip();
  }

  select(node, aloud = true) {
    this.selected = node;
    this.markSelected();
    this.onSelect(this, aloud);
  }

  markSelected() {
    for (const cell of this.box.querySelectorAll(".selected")) {
      cell.classList.remove("selected");
      cell.removeAttribute("aria-selected");
    }
    const cell = this.cells.get(`module${this.selected.key}`);
    if (!cell) {
      this.box.removeAttribute("aria-activedescendant");
      return null;
    }
    cell.classList.add("selected");
    cell.setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", cell.id);
    return cell;
  }

  zoom(node) {
    hideTip();
    this.zoomed = node;
    this.draw();
    this.select(node);
    this.onZoom(this);
  }

  zoomTo(module) {
    this.zoom(this.nodes.of(module));
  }

  zoomOut() {
    if (this.zoomed.parent) this.zoom(this.zoomed.parent);
  }

  hasInside(node) {
    return node.run > 1 || this.report.children[node.first].length > 0;
  }

  onClick(event) {
    const cell = event.target.closest(".cell");
    if (!cell) return;
    const { kind, node } = cell.shown;
    this.box.focus({ preventScroll: true });
    if (kind === "rest") this.zoom(node.parent);
    else if (node.key === this.zoomed.key) {
      if (kind === "own" || !node.parent) this.select(node);
      else this.zoomOut();
    } else if (this.hasInside(node)) this.zoom(node);
    else this.select(node);
  }

  onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const step = {
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      ArrowDown: () => this.stepTo((this.levels[this.levelOf(this.selected) + 1] || []).find(({ node }) => node.parent.key === this.selected.key)),
      ArrowUp: () => (this.selected.key === this.zoomed.key ? this.zoomOut() : this.stepTo({ node: this.selected.parent })),
      Enter: () => this.zoom(this.selected),
      " ": () => this.zoom(this.selected),
      Escape: () => this.zoomOut(),
      Backspace: () => this.zoomOut(),
      Home: () => this.zoom(this.nodes.root),
    }[event.key];
    if (!step) return;
    event.preventDefault();
    step();
  }

  levelOf(node) {
    return node.depth - this.zoomed.depth;
  }

  /** Select the next or previous drawn module of a row. */
  step(by) {
    const level = this.levels[this.levelOf(this.selected)] || [];
    this.stepTo(level[level.findIndex(({ node }) => node.key === this.selected.key) + by]);
  }

  stepTo(cell) {
    if (!cell || !cell.node) return;
    this.select(cell.node);
    const element = this.cells.get(`module${cell.node.key}`);
    if (element && element.clientWidth < 120) showTip(element, this.tipOf(element.shown));
    else hideTip();
  }
}
