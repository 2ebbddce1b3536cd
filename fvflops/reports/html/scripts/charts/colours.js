// Colours of modules: by class, phase, operator, FLOP/s, or change from one report to another.
import { short } from "../base/numbers.js";
import { isRate, moduleValue, reports, valueOf, view, widthKey } from "../data/view.js";

export const COLOURS = 11; // classes or operators beyond these share one more colour
const PHASE_COLOURS = { forward: 0, recompute: 2, backward: 3, optimizer: 4 };

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
    for (const [name, value] of report.shares(widthKey(), view, [0], "operator")) sums.set(name, (sums.get(name) || 0) + value);
  }
  return group(rank(sums));
}

const phaseGroups = {
  names: ["forward", "recompute", "backward", "optimizer", "other"],
  count: COLOURS + 1,
  more: false,
  of: (name) => (name in PHASE_COLOURS ? PHASE_COLOURS[name] : COLOURS),
};

/** Return the colours of nodes of a report, `of` with and `ofOwn` without their submodules, and the legend. */
export function paint(report) {
  if (isRate()) return paintRate(report);
  if (view.split === "change" && reports.length === 2) return paintChange(report);
  if (view.split === "class") {
    const groups = classGroups();
    return {
      groups,
      of: (node) => `var(--c${groups.of(report.classOf(node.first))})`,
      ofOwn: () => "",
    };
  }
  const groups = view.split === "phase" ? phaseGroups : operatorGroups();
  const { own, total } = report.matrix(widthKey(), view, view.split, groups);
  return {
    groups,
    of: (node) => stripes(total, node.members, groups.count),
    ofOwn: (node) => stripes(own, node.members, groups.count),
  };
}

function stripes(matrix, modules, width) {
  let sum = 0;
  const present = [];
  for (let k = 0; k < width; k++) {
    let value = 0;
    for (const module of modules) value += matrix[module * width + k];
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
  const shade = (node) => (most ? Math.sqrt(valueOf(report, "rate", node.members) / most) * 100 : 0);
  return {
    scale: ["0", "low", "high", short(most, "FLOP/s")],
    note: "width: time, colour: FLOP/s",
    of: (node) => `color-mix(in oklab, var(--low), var(--high) ${shade(node).toFixed(1)}%)`,
    ofOwn: () => "",
  };
}

function paintChange(report) {
  const other = reports[1 - reports.indexOf(report)];
  const sign = report === reports[0] ? 1 : -1;
  const shade = (node) => {
    const matches = node.members.map((module) => other.find(report.paths[module])).filter((match) => match !== undefined);
    const value = valueOf(report, widthKey(), node.members);
    const otherValue = other.measures.has(widthKey()) ? valueOf(other, widthKey(), matches) : 0;
    return value + otherValue ? (sign * (otherValue - value)) / Math.max(value, otherValue) : 0;
  };
  return {
    scale: ["less in the other", "less", "more", "more in the other"],
    of: (node) => {
      const change = shade(node);
      const mark = change < 0 ? "--less" : "--more";
      return change ? `color-mix(in oklab, var(--same), var(${mark}) ${(20 + 80 * Math.abs(change)).toFixed(1)}%)` : "var(--same)";
    },
    ofOwn: () => "",
  };
}

/** Return the colour of each call of a timeline: by class, ops being lighter than their module, by operator or phase. */
export function callColour(report, calls) {
  if (view.split === "phase") return (call) => `var(--c${phaseGroups.of(calls.phaseOf(call))})`;
  if (view.split === "operator") {
    const groups = operatorGroups();
    return (call) => (calls.isModule(call) ? "var(--cell-none)" : `var(--c${groups.of(calls.nameOf(call))})`);
  }
  const groups = classGroups();
  return (call) => {
    const colour = `var(--c${groups.of(report.classOf(calls.module[call]))})`;
    return calls.isModule(call) ? colour : `color-mix(in oklab, ${colour}, var(--card) 50%)`;
  };
}
