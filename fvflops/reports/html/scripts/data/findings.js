// What costs most, in sentences. A sentence is a list of texts and of nodes, which the page links to.
import { enumerate, percent, plural, short, signed } from "../base/numbers.js";
import { valueOf, view, widthKey } from "./view.js";

const MOST = 0.9; // the share of a module from which its parent is not worth a sentence
const NAMED = 3;
const LEAST = 0.05; // the share from which an operator is worth a sentence
const MISMATCH = 3; // times the share of the FLOPs
const BETWEEN_OPS = "(between ops)";

const nounOf = ({ key, title }) => (/^[A-Z]{2}/.test(title) ? title : key === "calls" ? "op calls" : title.toLowerCase());
const verbOf = ({ key }, several) => (key === "parameters" ? (several ? "have" : "has") : several ? "take" : "takes");

/** Return sentences on where two reports differ in the chosen measure. */
export function findDifferences(here, there, nodes) {
  const key = widthKey();
  if (!there.measures.has(key)) return [];
  const { title, unit } = here.measures.get(key);
  const [before, after] = [here, there].map((report) => valueOf(report, key, [0]));
  if (before === after) return [[`Both have the same ${nounOf({ key, title })}: ${short(before, unit)}.`]];
  const change = before ? ` (${after < before ? "−" : "+"}${percent(Math.abs(after - before), before)})` : "";
  const sentences = [[`${title}: ${short(before, unit)} → ${short(after, unit)}${change}.`]];
  const found = differingNodes(here, there, nodes, key);
  const sentence = ["Largest differences: "];
  found.slice(0, NAMED).forEach(({ node, difference }, index) => sentence.push(index ? ", " : "", node, ` ${signed(difference, unit)}`));
  if (found.length) sentences.push([...sentence, "."]);
  return sentences;
}

/** Return the nodes that differ, the largest difference first: below the only ones that do. */
function differingNodes(here, there, nodes, key) {
  const differenceOf = (node) => {
    const matches = node.members.map((module) => there.find(here.paths[module])).filter((match) => match !== undefined);
    return valueOf(there, key, matches) - valueOf(here, key, node.members);
  };
  const differingIn = (parent) =>
    nodes
      .children(parent)
      .map((node) => ({ node, difference: differenceOf(node) }))
      .filter(({ difference }) => difference)
      .sort((a, b) => Math.abs(b.difference) - Math.abs(a.difference));
  let found = differingIn(nodes.root);
  for (let inside = found; inside.length === 1; ) {
    found = inside;
    inside = differingIn(found[0].node);
    if (inside.length) found = inside;
  }
  return found;
}

/** Return two to five sentences on the chosen measure of a report. */
export function findCosts(report, nodes) {
  const measure = report.measures.get(widthKey());
  const total = report.totals(measure.key, view).total[0];
  if (!(total > 0)) return [];
  const sentences = [sayModules(report, nodes, measure, total), sayOperators(report, measure, total), sayMismatch(report, measure, total), sayPhases(report, measure, total), sayMemory(report, nodes)];
  return sentences.filter(Boolean);
}

/** Return the nodes of the largest modules: below the only one that takes nearly everything. */
export function findLargest(report, nodes, key) {
  const value = (node) => valueOf(report, key, node.members);
  let node = nodes.root;
  for (;;) {
    const children = nodes
      .children(node)
      .filter((child) => value(child) > 0)
      .sort((a, b) => value(b) - value(a));
    const [first] = children;
    if (!first || value(first) < MOST * value(node) || !nodes.children(first).some((child) => value(child) > 0)) return { node, children };
    node = first;
  }
}

function sayModules(report, nodes, measure, total) {
  const { node, children } = findLargest(report, nodes, measure.key);
  const of = `of the ${nounOf(measure)}`;
  const shareOf = (item) => percent(valueOf(report, measure.key, item.members), total);
  const also = (item) => {
    if (measure.key !== "time" || !report.measures.has("flops")) return "";
    const flops = report.totals("flops", view).total[0];
    return flops ? ` and ${percent(valueOf(report, "flops", item.members), flops)} of the FLOPs` : "";
  };
  const named = children.slice(0, NAMED).filter((child) => valueOf(report, measure.key, child.members) >= LEAST * total);
  const sentence = [];
  if (node !== nodes.root) {
    sentence.push(node, node.count > 1 ? ` (${plural(node.count, "equal module")})` : "", ` ${verbOf(measure, node.count > 1)} ${shareOf(node)} ${of}${also(node)}`);
    named.forEach((child, index) => sentence.push(index ? ", " : ": ", child, ` ${shareOf(child)}`));
  } else {
    named.forEach((child, index) => sentence.push(index ? ", " : "", child, index ? ` ${shareOf(child)}${also(child)}` : ` ${verbOf(measure, child.count > 1)} ${shareOf(child)} ${of}${also(child)}`));
  }
  return sentence.length ? [...sentence, "."] : null;
}

function sayOperators(report, measure, total) {
  if (measure.key === "parameters" || measure.key === "calls") return null;
  const shares = report.shares(measure.key, view, [0], "operator").filter(([name, value]) => name !== BETWEEN_OPS && value >= LEAST * total);
  if (!shares.length || view.operator) return null;
  const texts = shares.slice(0, NAMED).map(([name, value]) => `${name} ${percent(value, total)}`);
  const between = report.shares(measure.key, view, [0], "operator").find(([name]) => name === BETWEEN_OPS);
  const rest = between && between[1] >= LEAST * total ? `; ${percent(between[1], total)} is between ops: Python and hooks` : "";
  return [`By operator: ${texts.join(", ")}${rest}.`];
}

/** Say which operators take a far larger share of the time than of the FLOPs. */
function sayMismatch(report, measure, total) {
  if (measure.key !== "time" || !report.measures.has("flops") || view.operator) return null;
  const flops = new Map(report.shares("flops", view, [0], "operator"));
  const allFlops = report.totals("flops", view).total[0];
  const found = report
    .shares("time", view, [0], "operator")
    .filter(([name, time]) => name !== BETWEEN_OPS && time >= LEAST * total && time / total >= (MISMATCH * (flops.get(name) || 0)) / (allFlops || 1))
    .slice(0, NAMED);
  if (!found.length) return null;
  const sum = (map, names) => names.reduce((value, name) => value + (map.get(name) || 0), 0);
  const names = found.map(([name]) => name);
  const time = found.reduce((value, [, part]) => value + part, 0);
  const bytes = report.measures.has("bytes") ? sum(new Map(report.shares("bytes", view, [0], "operator")), names) : 0;
  const intensity = bytes ? sum(flops, names) / bytes : 0;
  const moved = bytes ? ` and ${short(bytes, "B")} of memory traffic` : "";
  const bound = bytes && report.record.peaks && intensity < ridgeOf(report.record.peaks) ? ": memory-bound" : "";
  return [`${enumerate(names)} ${names.length > 1 ? "take" : "takes"} ${percent(time, total)} of the time for ${percent(sum(flops, names), allFlops)} of the FLOPs${moved}${bound}.`];
}

/** Return the FLOP/byte below which work is memory-bound for every dtype. */
export const ridgeOf = ({ bandwidth, flops }) => Math.min(...Object.values(flops)) / bandwidth;

function sayPhases(report, measure, total) {
  const shares = report.shares(measure.key, view, [0], "phase");
  if (shares.length < 2) return null;
  return [`By phase: ${shares.map(([name, value]) => `${name} ${percent(value, total)}`).join(", ")}.`];
}

function sayMemory(report, nodes) {
  const { memory } = report.record;
  if (!memory || !memory.at.length) return null;
  const totals = totalsOf(memory);
  const top = totals.reduce((best, value, index) => (value > totals[best] ? index : best), 0);
  return [`Memory is highest, ${short(totals[top], "B")}, in the ${memory.phases[memory.phase[top]]} phase at ${memory.labels[memory.label[top]]} of `, nodes.of(memory.module[top]), memory.measured ? " (measured)." : " (predicted)."];
}

/** Return the sum of the layers at each point of a memory curve. */
export const totalsOf = ({ layers, at }) => at.map((_, index) => layers.reduce((sum, [, values]) => sum + values[index], 0));
