"use strict";
// Script of the report page. Names come from models and are untrusted: they are inserted as text only, never as HTML.
(() => {
  const ROW_HEIGHT = 30;
  const LEVELS = 16;
  const LETTER = 7; // px; the width of a letter, to hide names that do not fit a narrow cell
  const MIN_WIDTH = 2; // px; narrower cells are merged with their neighbours
  const COLOURS = 11; // classes or operators beyond these share one more colour
  const FIRST_ROWS = 50;
  const MORE_ROWS = 500;
  const OTHER = "others";
  const PHASE_COLOURS = { forward: 0, recompute: 2, backward: 3, optimizer: 4 };

  const byId = (id) => document.getElementById(id);

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (key === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
      else if (key === "style") Object.assign(element.style, value);
      else element.setAttribute(key, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  const isolate = (text, attributes = {}) => make("bdi", attributes, text);

  // ---- number formats

  const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"]];
  const TIMES = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

  function short(value, unit = "") {
    if (unit === "ns") {
      const [size, name] = TIMES.find(([size]) => Math.abs(value) >= size) || TIMES[3];
      return `${Number((value / size).toPrecision(3)).toLocaleString("en")} ${name}`;
    }
    const rounded = Number(value.toPrecision(3));
    const [size, prefix] = PREFIXES.find(([size]) => Math.abs(rounded) >= size) || [1, ""];
    const number = Number((rounded / size).toPrecision(3)).toString();
    const suffix = unit === "B" && prefix === "K" ? "kB" : prefix + unit;
    return suffix ? `${number} ${suffix}` : number;
  }

  function percent(part, total) {
    if (!total) return "";
    const share = (100 * part) / total;
    if (part && Math.abs(share) < 0.05) return "<0.1%";
    return `${share.toFixed(1)}%`;
  }

  const thousands = (value) => (typeof value === "bigint" || Number.isInteger(value) ? value.toLocaleString("en") : String(value));
  const plural = (count, noun) => `${thousands(count)} ${noun}${count === 1 ? "" : "s"}`;

  // ---- the data of a report

  class Report {
    constructor(record) {
      if (record.schema > 1) throw new Error(`this report has schema ${record.schema}, and this page reads up to 1: open it in a page made by a newer fvflops`);
      const { parent, name, class: classes, about } = record.modules;
      this.record = record;
      this.size = parent.length;
      this.parent = parent;
      this.depth = new Int32Array(this.size);
      this.children = Array.from({ length: this.size }, () => []);
      for (let i = 1; i < this.size; i++) {
        this.children[parent[i]].push(i);
        this.depth[i] = this.depth[parent[i]] + 1;
      }
      const strings = record.strings;
      this.nameOf = (i) => (i ? strings[name[i]] || "''" : strings[classes[0]] || "model");
      this.classOf = (i) => strings[classes[i]];
      this.aboutOf = (i) => strings[about[i]];
      this.operators = record.operators;
      this.phases = record.phases.filter(Boolean);
      this.rows = record.rows;
      this.measures = new Map(record.measures.map((measure) => [measure.key, this.readMeasure(measure)]));
      this.totalsCache = new Map();
      this.title = this.classOf(0) || "model";
    }

    readMeasure({ key, title, unit, note, rows, values, unknown }) {
      const dense = new Float64Array(this.rows.module.length);
      const exact = new Map(); // row → digits, for values beyond the exact integers of Number
      values.forEach((value, position) => {
        const row = rows ? rows[position] : position;
        dense[row] = Number(value);
        if (typeof value === "string") exact.set(row, value);
      });
      return { key, title, unit, note, values: dense, exact, unknown: new Map(unknown) };
    }

    /** Return whether a row has the selected phase and operator; a row without a phase always does. */
    filter(view) {
      const { phase, operator } = this.rows;
      const selectedPhase = view.phase ? this.record.phases.indexOf(view.phase) : -1;
      const selectedOperator = view.operator ? this.operators.indexOf(view.operator) : -1;
      const noPhase = this.record.phases.indexOf("");
      return (row) =>
        phase[row] === noPhase ||
        ((!view.phase || phase[row] === selectedPhase) && (!view.operator || operator[row] === selectedOperator));
    }

    /** Return each module's value without and with submodules, and its number of unsupported op calls. */
    totals(key, view) {
      const name = JSON.stringify([key, view.phase, view.operator]);
      if (!this.totalsCache.has(name)) {
        if (this.totalsCache.size > 60) this.totalsCache.clear();
        this.totalsCache.set(name, this.sumModules(this.measures.get(key), this.filter(view)));
      }
      return this.totalsCache.get(name);
    }

    sumModules(measure, isSelected) {
      const own = new Float64Array(this.size);
      const unknown = new Float64Array(this.size);
      if (measure) {
        const { module } = this.rows;
        measure.values.forEach((value, row) => {
          if (value && isSelected(row)) own[module[row]] += value;
        });
        for (const [row, calls] of measure.unknown) if (isSelected(row)) unknown[module[row]] += calls;
      }
      const total = Float64Array.from(own);
      for (let i = this.size - 1; i > 0; i--) {
        total[this.parent[i]] += total[i];
        unknown[this.parent[i]] += unknown[i];
      }
      return { own, total, unknown };
    }

    /** Return the exact value of a module, submodules included. */
    exactly(key, view, module) {
      const measure = this.measures.get(key);
      const isSelected = this.filter(view);
      const inside = this.inside(module);
      let sum = 0n;
      let fractional = 0;
      this.rows.module.forEach((owner, row) => {
        if (!inside(owner) || !isSelected(row)) return;
        const value = measure.values[row];
        if (measure.exact.has(row)) sum += BigInt(measure.exact.get(row));
        else if (Number.isInteger(value)) sum += BigInt(value);
        else fractional += value;
      });
      return fractional ? Number(sum) + fractional : sum;
    }

    inside(module) {
      return (other) => {
        while (this.depth[other] > this.depth[module]) other = this.parent[other];
        return other === module;
      };
    }

    /** Return pairs of operator (or phase) and its value inside a module, largest first. */
    shares(key, view, module, axis) {
      const measure = this.measures.get(key);
      const isSelected = this.filter(view);
      const inside = this.inside(module);
      const names = axis === "phase" ? this.record.phases : this.operators;
      const sums = new Map();
      measure?.values.forEach((value, row) => {
        if (!value || !isSelected(row) || !inside(this.rows.module[row])) return;
        const name = names[this.rows[axis][row]];
        if (name) sums.set(name, (sums.get(name) || 0) + value);
      });
      return [...sums].sort((a, b) => b[1] - a[1]);
    }

    /** Return the value of each group of operators, or each phase, inside each module, as a matrix. */
    matrix(key, view, axis, groups) {
      const measure = this.measures.get(key);
      const isSelected = this.filter(view);
      const width = groups.count;
      const own = new Float64Array(this.size * width);
      const names = axis === "phase" ? this.record.phases : this.operators;
      const columns = names.map((name) => groups.of(name));
      measure.values.forEach((value, row) => {
        if (value && isSelected(row)) own[this.rows.module[row] * width + columns[this.rows[axis][row]]] += value;
      });
      const total = Float64Array.from(own);
      for (let i = this.size - 1; i > 0; i--) {
        for (let k = 0; k < width; k++) total[this.parent[i] * width + k] += total[i * width + k];
      }
      return { own, total };
    }

    path(module) {
      const names = [];
      for (let i = module; i > 0; i = this.parent[i]) names.push(this.nameOf(i));
      return names.reverse().join(".");
    }

    ancestors(module) {
      const modules = [];
      for (let i = module; i >= 0; i = this.parent[i]) modules.push(i);
      return modules.reverse();
    }

    get paths() {
      if (!this.allPaths) {
        this.allPaths = new Array(this.size).fill("");
        for (let i = 1; i < this.size; i++) {
          const above = this.allPaths[this.parent[i]];
          this.allPaths[i] = above ? `${above}.${this.nameOf(i)}` : this.nameOf(i);
        }
        this.lowered = this.allPaths.map((path, i) => `${path}\n${this.classOf(i)}`.toLowerCase());
        this.at = new Map(this.allPaths.map((path, i) => [path, i]));
      }
      return this.allPaths;
    }

    find(path) {
      return this.paths && this.at.get(path);
    }

    search(query) {
      if (!query) return null;
      const hit = new Uint8Array(this.size); // bits: 1 a match, 2 inside a match, 4 contains a match
      const lowered = query.toLowerCase();
      this.paths.forEach((_, i) => {
        if (i && hit[this.parent[i]] & 3) hit[i] |= 2;
        if (this.lowered[i].includes(lowered)) hit[i] |= 1;
      });
      for (let i = this.size - 1; i > 0; i--) if (hit[i] & 5) hit[this.parent[i]] |= 4;
      return hit;
    }
  }

  // ---- the selected view, shared by all parts of the page

  const reports = [];
  const view = { measure: "", phase: "", operator: "", split: "class", query: "" };
  const isRate = () => view.measure === "rate";
  const widthKey = () => (isRate() ? "time" : view.measure);
  const measureOf = (report = reports[0]) => report.measures.get(widthKey());

  function moduleValue(report, key, module) {
    if (key === "rate") {
      const time = report.totals("time", view).total[module];
      return time ? (report.totals("flops", view).total[module] * 1e9) / time : 0;
    }
    return report.totals(key, view).total[module];
  }

  function formatModule(report, key, module) {
    const [counted, unit] = key === "rate" ? ["flops", "FLOP/s"] : [key, report.measures.get(key).unit];
    const unknown = report.totals(counted, view).unknown[module];
    return (unknown ? "≥ " : "") + short(moduleValue(report, key, module), unit);
  }

  function keysOf(report) {
    const keys = [...report.measures.keys()];
    if (keys.includes("time") && keys.includes("flops")) keys.push("rate");
    return keys;
  }

  const titleOf = (key) => (key === "rate" ? "FLOP/s" : (reports.map((report) => report.measures.get(key)).find(Boolean) || {}).title);

  // ---- colours

  /** Assign colours to names in descending order of value; names beyond the last colour share one more. */
  function group(names) {
    const order = new Map(names.slice(0, COLOURS).map((name, index) => [name, index]));
    return {
      names: names.slice(0, COLOURS),
      count: COLOURS + 1,
      more: names.length > COLOURS,
      of: (name) => (order.has(name) ? order.get(name) : COLOURS),
    };
  }

  function rank(sums) {
    return [...sums].sort((a, b) => b[1] - a[1]).map(([name]) => name);
  }

  function classGroups() {
    const sums = new Map();
    for (const report of reports) {
      const { total } = report.totals(widthKey(), view);
      for (let i = 1; i < report.size; i++) sums.set(report.classOf(i), (sums.get(report.classOf(i)) || 0) + total[i]);
    }
    return group(rank([...sums].filter(([, value]) => value > 0)));
  }

  function operatorGroups() {
    const sums = new Map();
    for (const report of reports) {
      for (const [name, value] of report.shares(widthKey(), view, 0, "operator")) sums.set(name, (sums.get(name) || 0) + value);
    }
    return group(rank(sums));
  }

  const phaseGroups = {
    names: ["forward", "recompute", "backward", "optimizer", "other"],
    count: COLOURS + 1,
    more: false,
    of: (name) => (name in PHASE_COLOURS ? PHASE_COLOURS[name] : COLOURS),
  };

  /** Return the colours of a report's cells, and the legend. */
  function paint(report) {
    if (isRate()) return paintRate(report);
    if (view.split === "change" && reports.length === 2) return paintChange(report);
    if (view.split === "class") {
      const groups = classGroups();
      return {
        groups,
        of: (i) => `var(--c${groups.of(report.classOf(i))})`,
        ofOwn: () => "",
      };
    }
    const groups = view.split === "phase" ? phaseGroups : operatorGroups();
    const { own, total } = report.matrix(widthKey(), view, view.split, groups);
    return {
      groups,
      of: (i) => stripes(total, i, groups.count),
      ofOwn: (i) => stripes(own, i, groups.count),
    };
  }

  function stripes(matrix, module, width) {
    let sum = 0;
    const present = [];
    for (let k = 0; k < width; k++) {
      const value = matrix[module * width + k];
      if (value > 0) present.push([k, value]);
      sum += Math.max(value, 0);
    }
    if (present.length === 1) return `var(--c${present[0][0]})`;
    let position = 0;
    const stops = present.map(([k, value]) => {
      const from = position;
      position += (100 * value) / sum;
      return `var(--c${k}) ${from.toFixed(2)}% ${position.toFixed(2)}%`;
    });
    return stops.length ? `linear-gradient(to right, ${stops.join(", ")})` : "";
  }

  function paintRate(report) {
    let most = 0;
    for (let i = 0; i < report.size; i++) most = Math.max(most, moduleValue(report, "rate", i));
    const shade = (i) => (most ? Math.sqrt(moduleValue(report, "rate", i) / most) * 100 : 0);
    return {
      scale: ["0", "low", "high", short(most, "FLOP/s")],
      note: "width: time, colour: FLOP/s",
      of: (i) => `color-mix(in oklab, var(--low), var(--high) ${shade(i).toFixed(1)}%)`,
      ofOwn: () => "",
    };
  }

  function paintChange(report) {
    const other = reports[1 - reports.indexOf(report)];
    const sign = report === reports[0] ? 1 : -1;
    const shade = (i) => {
      const match = other.find(report.paths[i]);
      const value = moduleValue(report, widthKey(), i);
      const otherValue = match === undefined ? 0 : moduleValue(other, widthKey(), match);
      return value + otherValue ? (sign * (otherValue - value)) / Math.max(value, otherValue) : 0;
    };
    return {
      scale: ["less in the other", "less", "more", "more in the other"],
      of: (i) => {
        const change = shade(i);
        const mark = change < 0 ? "--less" : "--more";
        return change ? `color-mix(in oklab, var(--same), var(${mark}) ${(20 + 80 * Math.abs(change)).toFixed(1)}%)` : "var(--same)";
      },
      ofOwn: () => "",
    };
  }

  // ---- the icicle plot

  class Icicle {
    constructor(report, number) {
      this.report = report;
      this.number = number;
      this.zoomed = 0;
      this.selected = 0;
      this.cells = new Map();
      this.heading = make("h3", { class: "picture-title", hidden: true }, isolate(""));
      this.box = make("div", {
        class: "icicle",
        role: "tree",
        tabindex: "0",
        "aria-label": "Module tree: width is the chosen measure",
        on: {
          keydown: (event) => this.onKey(event),
          click: (event) => this.onClick(event),
        },
      });
      this.element = make("div", {}, this.heading, this.box);
    }

    draw() {
      if (!this.report.measures.has(widthKey())) return; // of a comparison, the other report may lack the measure
      const width = this.box.clientWidth || 1000;
      const { report } = this;
      const { own, total } = report.totals(widthKey(), view);
      const paints = paint(report);
      const hits = report.search(view.query);
      const seen = new Set();
      const fresh = document.createDocumentFragment();
      let deepest = 0;
      this.levels = [];
      const cellOf = (key, kind, module, depth, x, w) => {
        let cell = this.cells.get(key);
        if (!cell) {
          cell = make("div", { class: `cell ${kind}`, "data-module": module });
          this.cells.set(key, cell);
          fresh.append(cell);
        }
        seen.add(key);
        deepest = Math.max(deepest, depth);
        cell.style.left = `${(x * 100).toFixed(4)}%`;
        cell.style.width = `${(w * 100).toFixed(4)}%`;
        cell.style.top = `${depth * ROW_HEIGHT}px`;
        return cell;
      };
      const sum = total[this.zoomed];
      const stack = [[this.zoomed, 0, 0, 1]];
      while (stack.length) {
        const [module, depth, x, w] = stack.pop();
        const cell = cellOf(`m${module}`, "module", module, depth, x, w);
        this.fill(cell, module, depth, w * width, paints, hits);
        (this.levels[depth] ||= []).push(module);
        if (depth + 1 >= LEVELS || !total[module]) continue;
        this.divide(module, x, w, width, own, total, (kind, child, from, span, count) => {
          if (kind === "module") stack.push([child, depth + 1, from, span]);
          else this.fillSmall(cellOf(`${kind}${child}`, kind, kind === "own" ? module : report.parent[child], depth + 1, from, span), kind, child, span * width, count, paints, hits);
        });
      }
      for (const level of this.levels) {
        level.sort((a, b) => a - b);
        for (const module of level) this.markExpanded(module, seen);
      }
      for (const [key, cell] of this.cells) {
        if (!seen.has(key)) {
          cell.remove();
          this.cells.delete(key);
        }
      }
      this.box.append(fresh);
      // Cells keep their DOM position so that they can be animated; aria-owns gives screen readers their order.
      const order = [...this.cells.values()].filter((cell) => cell.id).sort((a, b) => a.dataset.module - b.dataset.module);
      this.box.setAttribute("aria-owns", order.map((cell) => cell.id).join(" "));
      this.box.style.height = `${(deepest + 1) * ROW_HEIGHT}px`;
      this.box.classList.toggle("empty", !sum);
      this.markSelected();
    }

    /** Call `put` for each child of a module, with narrow neighbours merged, and for the module without its children. */
    divide(module, x, w, width, own, total, put) {
      const scale = w / total[module];
      let left = x;
      let narrow = null;
      const flush = () => {
        if (narrow && (narrow.to - narrow.from) * width >= 0.4) put("rest", narrow.first, narrow.from, narrow.to - narrow.from, narrow.count);
        narrow = null;
      };
      for (const child of this.report.children[module]) {
        const span = total[child] * scale;
        if (span <= 0) continue;
        if (span * width < MIN_WIDTH) {
          narrow ||= { first: child, from: left, count: 0 };
          narrow.count += 1;
          narrow.to = left + span;
        } else {
          flush();
          put("module", child, left, span);
        }
        left += span;
      }
      flush();
      if (left > x && own[module] * scale * width >= 1) put("own", module, left, own[module] * scale);
    }

    fill(cell, module, depth, pixels, paints, hits) {
      const { report } = this;
      const key = widthKey();
      const share = percent(moduleValue(report, key, module), moduleValue(report, key, 0));
      const text = formatModule(report, view.measure, module);
      cell.id = `cell-${this.number}-${module}`;
      cell.setAttribute("role", "treeitem");
      cell.setAttribute("aria-level", depth + 1);
      cell.setAttribute("aria-label", this.describe(module));
      cell.classList.toggle("thin", pixels < 8);
      cell.title = `${report.path(module) || report.title}\n${report.classOf(module)}\n${titleOf(view.measure)} ${text} · ${share}`;
      cell.style.background = paints.of(module);
      this.mark(cell, hits, module);
      const parts = [];
      const name = report.nameOf(module).slice(0, 200);
      if (pixels > 60 || name.length * LETTER + 8 <= pixels) parts.push(isolate(name, { class: "label" }));
      cell.classList.toggle("narrow", pixels <= 60);
      if (pixels > (isRate() ? 140 : 90)) parts.push(make("span", { class: "share" }, isRate() ? text : pixels > 190 ? `${text} · ${share}` : share));
      cell.replaceChildren(...parts);
    }

    markExpanded(module, drawn) {
      const children = this.report.children[module];
      if (children.length) this.cells.get(`m${module}`).setAttribute("aria-expanded", String(children.some((child) => drawn.has(`m${child}`))));
    }

    fillSmall(cell, kind, module, pixels, count, paints, hits) {
      const { report } = this;
      cell.setAttribute("aria-hidden", "true");
      if (kind === "own") {
        const value = report.totals(widthKey(), view).own[module];
        cell.title = `${report.path(module) || report.title}: without its submodules\n${short(value, measureOf(report).unit)}`;
        cell.style.background = paints.ofOwn(module);
        cell.replaceChildren(...(pixels > 40 ? [make("span", { class: "label" }, "itself")] : []));
      } else {
        const colour = paints.of(module);
        cell.style.setProperty("--tint", colour.startsWith("linear") || !colour ? "var(--cell-none)" : colour);
        cell.title = `${plural(count, "module")} too narrow to draw: zoom in`;
        cell.replaceChildren(...(pixels > 60 ? [make("span", { class: "label" }, `${count} more`)] : []));
      }
      this.mark(cell, hits, module);
    }

    mark(cell, hits, module) {
      cell.classList.toggle("hit", Boolean(hits && hits[module] & 1 && cell.classList.contains("module")));
      cell.classList.toggle("dim", Boolean(hits && !(hits[module] & 3)));
    }

    describe(module) {
      const { report } = this;
      const share = percent(moduleValue(report, widthKey(), module), moduleValue(report, widthKey(), 0));
      const name = report.path(module).slice(-300) || "the whole model";
      return `${name}, ${report.classOf(module).slice(0, 200)}, ${titleOf(view.measure)} ${formatModule(report, view.measure, module)}, ${share} of the model`;
    }

    select(module, aloud = true) {
      this.selected = module;
      this.markSelected();
      if (aloud) byId("live").textContent = this.describe(module);
      drawDetail(this);
    }

    markSelected() {
      for (const cell of this.box.querySelectorAll(".selected")) {
        cell.classList.remove("selected");
        cell.removeAttribute("aria-selected");
      }
      const cell = this.cells.get(`m${this.selected}`);
      if (!cell) {
        this.box.removeAttribute("aria-activedescendant");
        return;
      }
      cell.classList.add("selected");
      cell.setAttribute("aria-selected", "true");
      this.box.setAttribute("aria-activedescendant", cell.id);
    }

    zoom(module) {
      this.zoomed = module;
      this.draw();
      this.select(module);
      drawPath(this);
      syncZoom(this);
    }

    zoomOut() {
      if (this.zoomed) this.zoom(this.report.parent[this.zoomed]);
    }

    onClick(event) {
      const cell = event.target.closest(".cell");
      if (!cell) return;
      const module = Number(cell.dataset.module);
      this.box.focus({ preventScroll: true });
      if (module === this.zoomed && !cell.classList.contains("rest")) {
        if (cell.classList.contains("own") || !module) this.select(module);
        else this.zoomOut();
      } else if (this.report.children[module].length) this.zoom(module);
      else this.select(module);
    }

    onKey(event) {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const step = {
        ArrowLeft: () => this.selectSibling(-1),
        ArrowRight: () => this.selectSibling(1),
        ArrowDown: () => this.drawn(this.report.children[this.selected].find((child) => this.cells.has(`m${child}`))),
        ArrowUp: () => (this.selected === this.zoomed ? this.zoomOut() : this.drawn(this.report.parent[this.selected])),
        Enter: () => this.zoom(this.selected),
        " ": () => this.zoom(this.selected),
        Escape: () => this.zoomOut(),
        Backspace: () => this.zoomOut(),
        Home: () => this.zoom(0),
      }[event.key];
      if (!step) return;
      event.preventDefault();
      step();
    }

    selectSibling(step) {
      const level = this.levels[this.report.depth[this.selected] - this.report.depth[this.zoomed]] || [];
      this.drawn(level[level.indexOf(this.selected) + step]);
    }

    drawn(module) {
      if (module !== undefined && module >= 0) this.select(module);
    }
  }

  const pictures = [];

  /** Zoom the other picture of a comparison to the module of the same name. */
  function syncZoom(picture) {
    for (const other of pictures) {
      const module = other === picture ? undefined : other.report.find(picture.report.path(picture.zoomed));
      if (module !== undefined && module !== other.zoomed) {
        other.zoomed = other.selected = module;
        other.draw();
      }
    }
  }

  function drawPath(picture) {
    const { report, zoomed } = picture;
    const items = report.ancestors(zoomed).map((module) =>
      make(
        "button",
        {
          type: "button",
          class: "crumb",
          "aria-current": module === zoomed ? "location" : undefined,
          title: report.path(module) || report.title,
          on: { click: () => picture.zoom(module) },
        },
        isolate(report.nameOf(module).slice(0, 200)),
      ),
    );
    byId("path").replaceChildren(...items);
  }

  function drawLegend() {
    const paints = paint(reports[0]);
    const legend = byId("legend");
    if (paints.scale) {
      const [from, low, high, to] = paints.scale;
      const bar = make("span", { class: "ramp", "aria-hidden": "true" });
      const middle = low === "less" ? "var(--same), " : "";
      bar.style.background = `linear-gradient(to right, var(--${low}), ${middle}var(--${high}))`;
      legend.replaceChildren(make("span", {}, from), bar, make("span", {}, to), make("span", { class: "hint" }, paints.note || ""));
      return;
    }
    const { groups } = paints;
    const present = view.split === "phase" ? groups.names.filter((name) => reports.some((report) => report.phases.includes(name))) : groups.names;
    const swatch = (k, name) => make("span", { class: "swatch", title: name }, make("i", { style: { background: `var(--c${k})` } }), isolate(name.slice(0, 60)));
    const items = present.map((name) => swatch(groups.of(name), name || "(no class)"));
    if (groups.more) items.push(swatch(COLOURS, OTHER));
    legend.replaceChildren(...items);
  }

  function drawDetail(picture) {
    const { report, selected } = picture;
    const key = widthKey();
    const facts = keysOf(report).map((name) => {
      const exact = name === "rate" ? "" : thousands(report.exactly(name, view, selected));
      return make(
        "tr",
        { class: name === view.measure ? "current" : undefined },
        make("th", { scope: "row" }, titleOf(name)),
        make("td", {}, formatModule(report, name, selected)),
        make("td", { class: "quiet" }, name === "rate" ? "" : percent(moduleValue(report, name, selected), moduleValue(report, name, 0))),
        make("td", { class: "quiet digits" }, exact),
      );
    });
    const about = report.aboutOf(selected);
    const unknown = report.totals(key, view).unknown[selected];
    const blocks = [
      make(
        "div",
        {},
        make("h3", { title: report.path(selected) || report.title }, isolate(report.path(selected) || report.title)),
        make("p", { class: "quiet clip", title: about }, isolate(report.classOf(selected) || "no class"), about ? isolate(`(${about})`) : null),
        unknown ? make("p", { class: "warn" }, `Lower bound: the ${titleOf(key)} of ${plural(unknown, "unsupported op call")} inside are not counted.`) : null,
        make("table", { class: "facts" }, make("caption", { class: "hidden" }, "The selected module in every measure"), make("tbody", {}, ...facts)),
      ),
      bars(key === "parameters" ? "By name" : "By operator", report.shares(key, view, selected, "operator"), report),
      report.phases.length > 1 ? bars("By phase", report.shares(key, view, selected, "phase"), report) : null,
    ];
    byId("detail").replaceChildren(...blocks.filter(Boolean));
  }

  function bars(title, shares, report) {
    const total = shares.reduce((sum, [, value]) => sum + value, 0);
    const { unit } = measureOf(report);
    const shown = shares.slice(0, 8);
    const rest = shares.slice(8).reduce((sum, [, value]) => sum + value, 0);
    if (rest) shown.push([`${shares.length - 8} ${OTHER}`, rest]);
    return make(
      "div",
      {},
      make("h3", {}, `${title}, ${measureOf(report).title}`),
      shown.length
        ? make(
            "ul",
            { class: "bars" },
            ...shown.map(([name, value]) =>
              make(
                "li",
                { title: name },
                isolate(name.slice(0, 100)),
                make("span", { class: "bar", "aria-hidden": "true" }, make("i", { style: { width: `${(100 * value) / total}%` } })),
                make("span", { class: "digits" }, `${short(value, unit)} · ${percent(value, total)}`),
              ),
            ),
          )
        : make("p", { class: "quiet" }, "Nothing in this measure."),
    );
  }

  // ---- sortable tables

  class Table {
    /** `columns` are {title, value, write, number}; `rows` returns the indexes of rows, `open` is called with one. */
    constructor(box, { caption, columns, rows, open, sort }) {
      Object.assign(this, { box, caption, columns, rows, open, sort });
      this.limit = FIRST_ROWS;
    }

    draw(keepLimit = false) {
      if (!keepLimit) this.limit = FIRST_ROWS;
      const columns = this.columns();
      const sorted = columns.find(({ key }) => key === this.sort.key) || columns[0];
      const rows = this.rows();
      const values = new Map(rows.map((row) => [row, sorted.value(row)]));
      const sign = this.sort.descending ? -1 : 1;
      const compare = sorted.number ? (a, b) => a - b : (a, b) => (a < b ? -1 : a > b ? 1 : 0);
      rows.sort((a, b) => sign * compare(values.get(a), values.get(b)) || a - b);
      const shown = rows.slice(0, this.limit);
      const head = make("tr", {}, ...columns.map((column) => this.drawHeading(column, sorted)));
      const body = make("tbody", {}, ...shown.map((row) => this.drawRow(row, columns)));
      const left = rows.length - shown.length;
      const more = left
        ? make("button", { type: "button", class: "button more", on: { click: () => this.showMore() } }, `Show ${thousands(Math.min(left, MORE_ROWS))} more of ${thousands(rows.length)}`)
        : null;
      const rest = left ? make("p", { class: "hint rest-of-rows" }, `and ${plural(left, "more row")}, shown in the browser`) : null;
      const table = make("table", { "aria-rowcount": rows.length + 1 }, make("caption", { class: "hidden" }, this.caption), make("thead", {}, head), body);
      this.box.replaceChildren(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": this.caption }, table), ...(more ? [more, rest] : []));
    }

    drawHeading(column, sorted) {
      const direction = column === sorted ? (this.sort.descending ? "descending" : "ascending") : undefined;
      const mark = direction ? (this.sort.descending ? " ↓" : " ↑") : "";
      return make(
        "th",
        { scope: "col", class: column.number ? "number" : undefined, "aria-sort": direction },
        make("button", { type: "button", "data-key": column.key, on: { click: () => this.sortBy(column) } }, column.title + mark),
      );
    }

    drawRow(row, columns) {
      return make(
        "tr",
        {},
        ...columns.map((column, index) => {
          const cell = make(index ? "td" : "th", { scope: index ? undefined : "row", class: column.number ? "number" : "name" });
          column.write(cell, row);
          if (!index && this.open) {
            const button = make("button", { type: "button", class: "open", title: cell.title, on: { click: () => this.open(row) } }, ...cell.childNodes);
            cell.replaceChildren(button);
          }
          return cell;
        }),
      );
    }

    sortBy(column) {
      const descending = this.sort.key === column.key ? !this.sort.descending : Boolean(column.number);
      this.sort = { key: column.key, descending };
      this.draw();
      this.box.querySelector(`thead button[data-key="${column.key}"]`).focus();
    }

    showMore() {
      const from = this.limit;
      this.limit += MORE_ROWS;
      this.draw(true);
      const next = this.box.querySelectorAll("tbody tr")[from];
      next?.querySelector("button")?.focus();
    }
  }

  const text = (key, title, read) => ({
    key,
    title,
    value: (row) => read(row),
    write: (cell, row) => {
      cell.title = read(row);
      cell.append(isolate(read(row).slice(0, 400)));
    },
  });

  function shareColumn(value, unknown = () => 0) {
    return {
      key: "share",
      title: `% of ${measureOf()?.title}`,
      number: true,
      value,
      write: (cell, row) => {
        const total = moduleValue(reports[0], widthKey(), 0);
        const share = total ? (100 * value(row)) / total : 0;
        cell.classList.add("sharecell");
        cell.style.setProperty("--share", `${Math.min(share, 100).toFixed(2)}%`);
        cell.append(unknown(row) && !value(row) ? "unsupported" : percent(value(row), total));
      },
    };
  }

  function moduleColumns() {
    const [report] = reports;
    const columns = [text("name", "Module", (i) => report.paths[i] || report.title), text("class", "Class", (i) => report.classOf(i))];
    for (const key of keysOf(report)) {
      columns.push({
        key,
        title: titleOf(key),
        number: true,
        value: (i) => moduleValue(report, key, i),
        write: (cell, i) => {
          const value = moduleValue(report, key, i);
          cell.append(formatModule(report, key, i));
          cell.classList.toggle("zero", !value);
          cell.classList.toggle("current", key === view.measure);
          const unknown = key === "rate" ? 0 : report.totals(key, view).unknown[i];
          if (unknown) cell.title = `${plural(unknown, "unsupported op call")} inside`;
        },
      });
    }
    columns.splice(
      2,
      0,
      shareColumn(
        (i) => moduleValue(report, widthKey(), i),
        (i) => report.totals(widthKey(), view).unknown[i],
      ),
    );
    return columns;
  }

  function moduleRows() {
    const [report] = reports;
    const hits = report.search(view.query);
    const rows = [];
    for (let i = 0; i < report.size; i++) if (!hits || hits[i] & 1) rows.push(i);
    return rows;
  }

  function sumOperators() {
    const [report] = reports;
    const noPhase = report.record.phases.indexOf("");
    const isSelected = report.filter({ phase: view.phase, operator: "" });
    const sums = new Map();
    for (const [key, measure] of report.measures) {
      const sum = (sums[key] = new Float64Array(report.operators.length));
      measure.values.forEach((value, row) => {
        if (value && report.rows.phase[row] !== noPhase && isSelected(row)) sum[report.rows.operator[row]] += value;
      });
      const unknown = new Float64Array(report.operators.length);
      for (const [row, calls] of measure.unknown) if (isSelected(row)) unknown[report.rows.operator[row]] += calls;
      sums.set(key, { sum, unknown });
    }
    return sums;
  }

  function operatorTable() {
    const [report] = reports;
    let sums = new Map();
    const keys = () => keysOf(report).filter((key) => key === "rate" || sums.get(key).sum.some(Boolean));
    const value = (key, i) => {
      if (key !== "rate") return sums.get(key).sum[i];
      const time = sums.get("time").sum[i];
      return time ? (sums.get("flops").sum[i] * 1e9) / time : 0;
    };
    return new Table(byId("operator-table"), {
      caption: "Operators of the whole model",
      sort: { key: "share", descending: true },
      rows: () => {
        sums = sumOperators();
        const noPhase = report.record.phases.indexOf("");
        const ran = new Set();
        report.rows.phase.forEach((phase, row) => phase !== noPhase && ran.add(report.rows.operator[row]));
        return [...ran].filter((i) => [...sums.values()].some(({ sum, unknown }) => sum[i] || unknown[i]));
      },
      columns: () => {
        sums = sumOperators();
        return [
          text("name", "Operator", (i) => report.operators[i] || "''"),
          shareColumn(
            (i) => sums.get(widthKey())?.sum[i] || 0,
            (i) => sums.get(widthKey())?.unknown[i] || 0,
          ),
          ...keys().map((key) => ({
            key,
            title: titleOf(key),
            number: true,
            value: (i) => value(key, i),
            write: (cell, i) => {
              const unknown = sums.get(key === "rate" ? "flops" : key).unknown[i];
              const known = value(key, i);
              cell.append(unknown && !known ? "unsupported" : (unknown ? "≥ " : "") + short(known, key === "rate" ? "FLOP/s" : report.measures.get(key).unit));
              cell.classList.toggle("zero", !known && !unknown);
              cell.classList.toggle("warn", Boolean(unknown));
              cell.classList.toggle("current", key === view.measure);
            },
          })),
        ];
      },
      open: (i) => {
        byId("operator").value = view.operator = view.operator === report.operators[i] ? "" : report.operators[i];
        drawAll();
        byId("h-picture").scrollIntoView({ block: "start" });
      },
    });
  }

  // ---- a comparison of two reports

  function differenceTable() {
    let rows = [];
    const collect = () => {
      const [here, there] = reports;
      const paths = [...new Set([...here.paths, ...there.paths])];
      const key = widthKey();
      const of = (report, path) => {
        const module = report.find(path);
        return module === undefined || !report.measures.has(key) ? null : moduleValue(report, key, module);
      };
      rows = paths.map((path) => ({ path, here: of(here, path), there: of(there, path) })).filter((row) => row.here !== row.there);
    };
    const difference = (i) => (rows[i].there || 0) - (rows[i].here || 0);
    const number = (key, title, read, write) => ({ key, title, number: true, value: read, write: (cell, i) => cell.append(write(i)) });
    return new Table(byId("differences"), {
      caption: "Differences by module",
      sort: { key: "size", descending: true },
      rows: () => {
        collect();
        return rows.map((_, i) => i);
      },
      columns: () => {
        const unit = measureOf().unit;
        const side = (name) => (i) => (rows[i][name] === null ? "missing" : short(rows[i][name], unit));
        return [
          text("name", "Module", (i) => rows[i].path || "the whole model"),
          number("here", "This", (i) => rows[i].here || 0, side("here")),
          number("there", "Other", (i) => rows[i].there || 0, side("there")),
          number("size", "Difference", (i) => Math.abs(difference(i)), (i) => (difference(i) > 0 ? "+" : "") + short(difference(i), unit)),
          number("ratio", "Change", (i) => difference(i) / (rows[i].here || 1), (i) => (rows[i].here ? (difference(i) > 0 ? "+" : "") + percent(difference(i), rows[i].here) : "new")),
        ];
      },
      open: (i) => {
        const picture = pictures.find((item) => item.report.find(rows[i].path) !== undefined);
        picture.zoom(picture.report.find(rows[i].path));
      },
    });
  }

  /** Return the report in the text of a page or of a JSON file; any other text raises Error. */
  function readFile(content) {
    const match = content.match(/<script type="application\/json" id="data">([\s\S]*?)<\/script>/);
    let record;
    try {
      record = JSON.parse(match ? match[1] : content);
    } catch (error) {
      throw new Error("it is not a complete report of fvflops");
    }
    if (record?.format === "fvflops.summary") return new Report(readSummary(record));
    if (record?.format !== "fvflops.report") throw new Error("it is not a report of fvflops: make one with --format html or json");
    return new Report(record);
  }

  /** Escape unprintable characters as Python does, as in the names of a page. */
  function escapeUnprintable(text) {
    const named = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };
    return text.replace(/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu, (mark) => {
      const code = mark.codePointAt(0);
      const [letter, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
      return named[mark] || `\\${letter}${code.toString(16).padStart(digits, "0")}`;
    });
  }

  /** Convert a summary (--format json), which has modules but neither phases nor operators, to the data of a page. */
  function readSummary({ schema, about, columns, modules: moduleInfos, ledger, unknown_elements, unknown_places = {} }) {
    const strings = [];
    const indexes = new Map();
    const intern = (text) => {
      const shown = escapeUnprintable(text);
      if (!indexes.has(shown)) indexes.set(shown, strings.push(shown) - 1);
      return indexes.get(shown);
    };
    const modules = { parent: [], name: [], class: [], about: [] };
    const at = new Map();
    const names = [];
    for (const info of moduleInfos.filter(({ name, canonical }) => name === canonical)) {
      let above = info.name;
      do above = above.slice(0, Math.max(above.lastIndexOf("."), 0));
      while (above && !at.has(above));
      modules.parent.push(info.name ? at.get(above) || 0 : -1);
      modules.name.push(intern(info.name.slice(info.name.lastIndexOf(".") + 1)));
      modules.class.push(intern(info.class_name));
      modules.about.push(intern(info.extra_repr));
      at.set(info.name, names.push(info.name) - 1);
    }
    const measures = Object.entries(columns).map(([key, counts]) => {
      const values = names.map((name) => counts[name] || 0);
      names.forEach((name, i) => i && (values[modules.parent[i]] -= counts[name] || 0));
      return { key, title: key, unit: "", note: "", values, unknown: [] };
    });
    const rows = { module: names.map((_, i) => i), phase: names.map(() => 0), operator: names.map(() => 0) };
    const locations = Object.fromEntries(Object.entries(unknown_places).map(([op, calls]) => [op, Object.keys(calls).map(escapeUnprintable)]));
    return { schema, about, modules, phases: [""], operators: [""], rows, measures, ledger, unknown_elements, unknown_places: locations, strings };
  }

  async function compareWith(file) {
    try {
      const report = readFile(await file.text());
      report.file = file.name;
      closeOther(false);
      reports.push(report);
      view.split = "change";
      pictures.push(new Icicle(report, 1));
      byId("pictures").append(pictures[1].element);
      announce(`Compared with ${file.name}.`, false);
    } catch (error) {
      announce(`${file.name} cannot be compared with this report: ${error.message}.`, true);
      return;
    }
    fillControls();
    drawAll();
  }

  function closeOther(redraw = true) {
    if (reports.length < 2) return;
    reports.pop();
    pictures.pop().element.remove();
    if (view.split === "change") view.split = "class";
    if (redraw) {
      fillControls();
      drawAll();
    }
  }

  function announce(message, wrong) {
    byId("notice").textContent = wrong ? message : "";
    byId("notice").hidden = !wrong;
    byId("live").textContent = message;
  }

  function drawComparison() {
    const both = reports.length === 2;
    const totalOf = (report) => (report.measures.has(widthKey()) ? formatModule(report, widthKey(), 0) : "unknown");
    byId("comparison").hidden = !both;
    pictures.forEach((picture, index) => {
      picture.heading.hidden = !both;
      picture.heading.firstChild.textContent = `${index ? `Other (${picture.report.file.slice(0, 200)})` : "This"}: ${picture.report.title.slice(0, 200)} · ${measureOf().title} ${totalOf(picture.report)}`;
    });
    if (!both) return;
    const [here, there] = reports;
    const only = (a, b) => a.paths.filter((path) => b.find(path) === undefined).length;
    byId("compared").textContent = `${measureOf().title}: ${totalOf(here)} here, ${totalOf(there)} in the other. Modules are matched by name; ${plural(only(here, there), "module")} only here, ${plural(only(there, here), "module")} only in the other. Equal modules are not listed.`;
    if (!there.phases.length) byId("compared").textContent += " The other file is not split by phase and operator.";
    tables.differences.draw();
  }

  // ---- the controls and the rest of the page

  function drawTiles() {
    const [report] = reports;
    const keys = keysOf(report);
    const tiles = keys.map((key) => {
      const chosen = key === view.measure;
      const note = key === "rate" ? "FLOPs per second of measured time" : report.measures.get(key).note;
      const unknown = key === "rate" ? 0 : report.totals(key, view).unknown[0];
      return make(
        "button",
        {
          type: "button",
          class: "tile",
          role: "radio",
          "aria-checked": String(chosen),
          tabindex: chosen ? "0" : "-1",
          title: note,
          "data-key": key,
          on: { click: () => chooseMeasure(key), keydown: (event) => stepTiles(event, keys) },
        },
        make("span", { class: "tile-title" }, titleOf(key)),
        make("span", { class: "tile-value" }, formatModule(report, key, 0).replace(/ ?FLOP\/s$/, "")),
        make("span", { class: "tile-note" }, unknown ? `${plural(unknown, "op call")} unsupported` : note),
      );
    });
    byId("tiles").replaceChildren(...tiles);
  }

  function stepTiles(event, keys) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    chooseMeasure(keys[(keys.indexOf(view.measure) + step + keys.length) % keys.length]);
  }

  function chooseMeasure(key) {
    view.measure = key;
    drawAll();
    byId("tiles").querySelector(`[data-key="${key}"]`).focus();
  }

  function fillControls() {
    const [report] = reports;
    const options = (select, label, names, chosen) => {
      const items = [["", label], ...names.map((name) => [name, name])];
      select.replaceChildren(...items.map(([value, title]) => make("option", { value, selected: value === chosen }, title.slice(0, 80))));
    };
    options(byId("phase"), "all", report.phases, view.phase);
    byId("phase-label").hidden = report.phases.length < 2;
    const noPhase = report.record.phases.indexOf("");
    const ran = new Set(report.rows.operator.filter((_, row) => report.rows.phase[row] !== noPhase));
    options(byId("operator"), "all", [...ran].map((i) => report.operators[i]).sort(), view.operator);
    const splits = [["class", "Class"], ["operator", "Operator"]];
    if (report.phases.length > 1) splits.splice(1, 0, ["phase", "Phase"]);
    if (reports.length === 2) splits.push(["change", "Change"]);
    const radios = splits.map(([value, title]) =>
      make(
        "label",
        {},
        make("input", {
          type: "radio",
          name: "split",
          value,
          checked: value === view.split,
          on: {
            change: () => {
              view.split = value;
              drawPictures();
            },
          },
        }),
        title,
      ),
    );
    byId("split").replaceChildren(make("legend", {}, "Split by"), ...radios);
  }

  function drawLedger() {
    const { ledger, unknown_elements: elements, unknown_places: locations = {} } = reports[0].record;
    const labels = {
      counted: ["counted", "by a formula of this convention"],
      free: ["zero-FLOP", "views, copies, creation of tensors"],
      omitted: ["ignored", "arithmetic that this convention does not count"],
      unknown: ["unsupported", "no formula, so in no total"],
    };
    const cards = Object.entries(labels).map(([status, [name, meaning]]) => {
      const ops = ledger[status] || [];
      const calls = ops.reduce((sum, [, count]) => sum + count, 0);
      return make(
        "div",
        { class: `status ${status} ${calls ? "some" : "none"}` },
        make("h3", {}, make("i", { "aria-hidden": "true" }), name),
        make("p", { class: "big" }, thousands(calls), make("span", { class: "quiet" }, calls === 1 ? " call" : " calls")),
        make("p", { class: "quiet" }, meaning),
        ops.length
          ? make(
              "details",
              { open: status === "unknown" || status === "omitted" || ops.length <= 6 },
              make("summary", {}, plural(ops.length, "operator")),
              make("ul", {}, ...ops.map(([op, count]) => make("li", {}, isolate(op.slice(0, 300), { title: op }), make("span", { class: "digits" }, `× ${thousands(count)}`), op in elements ? make("span", { class: "warn" }, ` ${short(Number(elements[op]))} output elements`) : null, op in locations ? make("div", { class: "quiet" }, "in ", isolate(locations[op][0]), locations[op].length > 1 ? ` and ${plural(locations[op].length - 1, "more location")}` : "") : null))),
            )
          : null,
      );
    });
    byId("ledger").replaceChildren(...cards);
    const unknown = (ledger.unknown || []).length;
    byId("ledger-hint").textContent = unknown
      ? `${plural(unknown, "unsupported operator")}: the totals are lower bounds.`
      : "All operators that ran are supported by this convention.";
    byId("ledger-hint").classList.toggle("warn", unknown > 0);
  }

  function drawAbout() {
    const { about } = reports[0].record;
    const first = ["model", "inputs", "table", "multiply_add", "description", "device", "execution", "fvflops", "torch", "python"];
    const keys = [...first.filter((key) => key in about), ...Object.keys(about).filter((key) => !first.includes(key))];
    const OVERHEADS = { overhead_ns: "profiling overhead, subtracted", overhead_ns_per_op: "of that per op" };
    const labels = { table: "convention", multiply_add: "FLOPs per multiply-add", ...OVERHEADS };
    byId("about").replaceChildren(...keys.map((key) => make("div", {}, make("dt", {}, labels[key] || key.replaceAll("_", " ")), make("dd", { title: about[key] }, isolate(key in OVERHEADS ? short(Number(about[key]), "ns") : about[key].slice(0, 2000))))));
    const parts = [about.inputs, about.table && `convention ${about.table}`, about.multiply_add && `${about.multiply_add} FLOP${about.multiply_add === "1" ? "" : "s"} per multiply-add`].filter(Boolean);
    byId("title").replaceChildren(isolate(reports[0].title.slice(0, 200), { title: reports[0].title }));
    byId("subtitle").replaceChildren(...parts.flatMap((part, index) => [...(index ? [" · "] : []), isolate(part.slice(0, 300))]));
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

  function drawPictures() {
    for (const picture of pictures) picture.draw();
    drawLegend();
    drawPath(pictures[0]);
    drawDetail(pictures[0]);
    drawHits();
    byId("split").disabled = isRate();
  }

  const tables = {};

  function drawAll() {
    drawTiles();
    drawPictures();
    drawComparison();
    const key = isRate() ? "rate" : "share";
    if (["share", "rate"].includes(tables.modules.sort.key)) tables.modules.sort = { key, descending: true };
    tables.modules.draw();
    tables.operators.draw();
    const [report] = reports;
    byId("module-hint").textContent = `${plural(report.size, "module")}; submodules are included. Click a name to zoom to it.`;
    byId("operator-hint").textContent = "Click a name to show only that operator in the plot.";
    byId("operator-label").classList.toggle("active", Boolean(view.operator));
    byId("phase-label").classList.toggle("active", Boolean(view.phase));
  }

  function listen() {
    byId("phase").addEventListener("change", (event) => {
      view.phase = event.target.value;
      drawAll();
    });
    byId("operator").addEventListener("change", (event) => {
      view.operator = event.target.value;
      drawAll();
    });
    let waiting = 0;
    const searchNow = () => {
      clearTimeout(waiting);
      if (view.query === byId("search").value.trim()) return;
      view.query = byId("search").value.trim();
      drawPictures();
      tables.modules.draw();
    };
    byId("search").addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(searchNow, 120);
    });
    byId("search").addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      searchNow();
      const hits = reports[0].search(view.query);
      const first = hits ? hits.findIndex((hit) => hit & 1) : -1;
      if (first >= 0) pictures[0].zoom(first);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
      event.preventDefault();
      byId("search").focus();
    });
    byId("other").addEventListener("change", (event) => {
      if (event.target.files[0]) compareWith(event.target.files[0]);
      event.target.value = "";
    });
    byId("uncompare").addEventListener("click", () => closeOther());
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer.files[0]) compareWith(event.dataTransfer.files[0]);
    });
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (width === window.innerWidth) return;
      width = window.innerWidth;
      for (const picture of pictures) picture.draw();
    });
  }

  // ---- light and dark

  const THEMES = { "": ["◐ Auto", "system setting"], light: ["☀ Light", "light"], dark: ["☾ Dark", "dark"] };

  function themePreference(theme) {
    // Storage may be blocked for pages opened from disk.
    try {
      if (theme === undefined) return localStorage.getItem("fvflops-theme") || "";
      localStorage.setItem("fvflops-theme", theme);
    } catch (error) {
      return "";
    }
    return theme;
  }

  function setTheme(theme) {
    const chosen = theme in THEMES ? theme : "";
    document.documentElement.dataset.theme = chosen;
    const [label, description] = THEMES[chosen];
    byId("theme").textContent = label;
    byId("theme").setAttribute("aria-label", `Colours: ${description}; press to change`);
  }

  function start() {
    setTheme(themePreference());
    byId("theme").addEventListener("click", () => {
      const order = Object.keys(THEMES);
      const next = order[(order.indexOf(document.documentElement.dataset.theme) + 1) % order.length];
      themePreference(next);
      setTheme(next);
    });
    const report = new Report(JSON.parse(byId("data").textContent));
    reports.push(report);
    const keys = keysOf(report);
    view.measure = keys.find((key) => report.totals(key, view).total[0] > 0) || keys[0];
    pictures.push(new Icicle(report, 0));
    byId("pictures").append(pictures[0].element);
    tables.modules = new Table(byId("module-table"), {
      caption: "Modules, submodules included",
      sort: { key: "share", descending: true },
      columns: moduleColumns,
      rows: moduleRows,
      open: (i) => {
        pictures[0].zoom(i);
        byId("h-picture").scrollIntoView({ block: "start" });
        pictures[0].box.focus({ preventScroll: true });
      },
    });
    tables.operators = operatorTable();
    tables.differences = differenceTable();
    fillControls();
    drawAbout();
    drawLedger();
    drawAll();
    listen();
    performance.mark("fvflops-drawn");
  }

  start();
})();
