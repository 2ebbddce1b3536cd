// The module tree as it is shown: consecutive equal modules are one node, which opens to the modules.
import { findEqual } from "./equal_modules.js";

const FEWEST = 3; // equal modules that become one node
const NUMBERED = /^(.*?)(\d+)$/;

/**
 * A module, or several equal ones.
 *
 * `parts` has the modules of each place: one place for a module as such, several for a run of consecutive equal modules.
 * A place has several modules where it is inside of a run: `attn` of 12 equal layers is one node of one place with 12.
 */
export class ModuleNode {
  /** `isPart`: one of the equal modules of the opened run `parent`. */
  constructor(report, parts, parent, isPart = false) {
    this.report = report;
    this.parts = parts;
    this.parent = parent;
    this.isPart = isPart;
    this.members = parts.length === 1 ? parts[0] : parts.flat();
    this.first = this.members[0];
    this.key = `${this.first}-${parts.length}-${this.members.length}`;
  }

  get run() {
    return this.parts.length;
  }

  /** The number of equal modules, 1 for a module as such. */
  get count() {
    return this.members.length;
  }

  get depth() {
    return this.parent ? this.parent.depth + 1 : 0;
  }

  /** The name, without those above: `0–11` for a run. */
  get name() {
    const { report, parts } = this;
    const name = report.nameOf(this.first);
    if (this.run === 1) return name;
    const last = report.nameOf(parts[this.run - 1][0]);
    const [from, to] = [name.match(NUMBERED), last.match(NUMBERED)];
    return from && to && from[1] === to[1] ? `${name}–${to[2]}` : `${name} … ${last}`;
  }

  /** The name as the plot shows it. */
  get label() {
    return this.run === 1 ? this.name : `${this.name} × ${this.run}`;
  }

  get path() {
    if (this.count === 1) return this.report.path(this.first);
    const above = this.isPart ? this.parent.parent : this.parent;
    return above && above.path ? `${above.path}.${this.name}` : this.name;
  }

  ancestors() {
    const nodes = [];
    for (let node = this; node; node = node.parent) nodes.push(node);
    return nodes.reverse();
  }

  sum(values) {
    let sum = 0;
    for (const member of this.members) sum += values[member];
    return sum;
  }
}

/** The nodes of a report. */
export class ModuleNodes {
  constructor(report) {
    this.report = report;
    this.equal = null;
    this.listed = null;
    this.root = new ModuleNode(report, [[0]], null);
  }

  /** Tell modules apart by another report's too, which are matched by name; null for none. */
  compareWith(other) {
    const { report } = this;
    this.listed = null;
    if (!other) {
      this.equal = null;
      return;
    }
    const alone = findEqual(other);
    this.equal = findEqual(report, (i) => {
      const match = other.find(report.paths[i]);
      return match === undefined ? "" : alone[match];
    });
  }

  /** Return the nodes below a node; `opened` shows the modules of a run one by one. */
  children(node, opened = false) {
    if (opened && node.run > 1) return node.parts.map((part) => new ModuleNode(this.report, [part], node, true));
    this.equal ||= findEqual(this.report);
    const { children } = this.report;
    const nodes = [];
    const first = children[node.first];
    for (let from = 0, to; from < first.length; from = to) {
      for (to = from + 1; to < first.length && this.equal[first[to]] === this.equal[first[from]]; to++);
      const parts = [];
      for (let k = from; k < to; k++) parts.push(node.count === 1 ? [first[k]] : node.members.map((member) => children[member][k]));
      if (parts.length >= FEWEST) nodes.push(new ModuleNode(this.report, parts, node));
      else for (const part of parts) nodes.push(new ModuleNode(this.report, [part], node));
    }
    return nodes;
  }

  /** Return all nodes, runs closed, each before those below it. */
  list() {
    if (this.listed) return this.listed;
    const nodes = [];
    const stack = [this.root];
    while (stack.length) {
      const node = stack.pop();
      nodes.push(node);
      stack.push(...this.children(node).reverse());
    }
    this.listed = nodes;
    return nodes;
  }

  /** Return the node of a module as such, below the nodes of the modules around it. */
  of(module) {
    let node = this.root;
    for (const above of this.report.ancestors(module).slice(1)) {
      node = this.children(node).find(({ members }) => members.includes(above));
      if (node.run > 1) node = this.children(node, true).find(({ first }) => first === above);
    }
    return node;
  }

  /** Return the node of the modules of the same names as another report's node; undefined without them. */
  matching(node) {
    const parts = node.parts.map((part) => part.map((module) => this.report.find(node.report.paths[module])).filter((module) => module !== undefined));
    const found = parts.filter((part) => part.length);
    if (!found.length) return undefined;
    return new ModuleNode(this.report, found, node.parent ? this.matching(node.parent) || this.root : null, node.isPart);
  }
}
