// The data of a report: modules, and the values of each measure by module, phase and operator.
import { unpack } from "./packed.js";

const SCHEMA = 3;

const unpackAll = (columns) => Object.fromEntries(Object.entries(columns).map(([key, column]) => [key, unpack(column)]));

export class Report {
  constructor(record) {
    if (record.schema > SCHEMA) throw new Error(`this report has schema ${record.schema}, and this page reads up to ${SCHEMA}: open it in a page made by a newer fvflops`);
    const { parent, name, class: classes, about } = unpackAll(record.modules);
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
    this.title = record.title || strings[classes[0]] || "model";
    this.nameOf = (i) => (i ? strings[name[i]] || "''" : this.title);
    this.classOf = (i) => strings[classes[i]];
    this.aboutOf = (i) => strings[about[i]];
    this.operators = record.operators;
    this.phases = record.phases.filter(Boolean);
    this.rows = unpackAll(record.rows);
    this.measures = new Map(record.measures.map((measure) => [measure.key, this.readMeasure(measure)]));
    this.totalsCache = new Map();
  }

  readMeasure({ key, title, unit, note, rows, values, unsupported }) {
    const dense = new Float64Array(this.rows.module.length);
    const exact = new Map(); // row → digits, for values beyond the exact integers of Number
    const filled = rows && unpack(rows);
    unpack(values).forEach((value, position) => {
      const row = filled ? filled[position] : position;
      dense[row] = Number(value);
      if (typeof value === "string") exact.set(row, value);
    });
    return { key, title, unit: key === "parameters" ? key : unit, note, values: dense, exact, unsupported: new Map(unsupported) };
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
    const unsupported = new Float64Array(this.size);
    if (measure) {
      const { module } = this.rows;
      measure.values.forEach((value, row) => {
        if (value && isSelected(row)) own[module[row]] += value;
      });
      for (const [row, calls] of measure.unsupported) if (isSelected(row)) unsupported[module[row]] += calls;
    }
    const total = Float64Array.from(own);
    for (let i = this.size - 1; i > 0; i--) {
      total[this.parent[i]] += total[i];
      unsupported[this.parent[i]] += unsupported[i];
    }
    return { own, total, unsupported };
  }

  /** Return the exact value of modules together, submodules included. */
  exactly(key, view, modules) {
    const measure = this.measures.get(key);
    const isSelected = this.filter(view);
    const inside = this.inside(modules);
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

  /** Return whether a module is one of some modules of one depth, or inside of one. */
  inside(modules) {
    const depth = this.depth[modules[0]];
    const wanted = new Set(modules);
    return (other) => {
      while (this.depth[other] > depth) other = this.parent[other];
      return wanted.has(other);
    };
  }

  /** Return pairs of operator (or phase) and its value inside modules, largest first. */
  shares(key, view, modules, axis) {
    const measure = this.measures.get(key);
    const isSelected = this.filter(view);
    const inside = this.inside(modules);
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
