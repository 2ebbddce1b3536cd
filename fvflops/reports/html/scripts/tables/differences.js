// The table of modules that differ between two reports.
import { byId } from "../base/elements.js";
import { percent, short, signed } from "../base/numbers.js";
import { measureOf, namesOf, valueOf, view, widthKey } from "../data/view.js";
import { Table, text } from "./table.js";

const LONGEST = 28; // letters of a name in a heading

/**
 * Return a row for each node of either report: {path, count, first, here, there}, a value being null where a report lacks
 * the module; `here` and `there` are the nodes of the two, which tell modules apart by both.
 */
export function collectRows(here, there, key) {
  const value = (report, modules) => (modules.length && report.measures.has(key) ? valueOf(report, key, modules) : null);
  const matches = (node, other) => node.members.map((module) => other.find(node.report.paths[module])).filter((match) => match !== undefined);
  const rowOf = (node, values) => ({ path: node.path, count: node.count, first: node.report.paths[node.first], ...values });
  const rows = here.list().map((node) => rowOf(node, { here: value(here.report, node.members), there: value(there.report, matches(node, there.report)) }));
  const added = there.list().filter((node) => !matches(node, here.report).length);
  return [...rows, ...added.map((node) => rowOf(node, { here: null, there: value(there.report, node.members) }))];
}

const isEqual = ({ here, there }) => here === there;
const countOf = (rows) => rows.reduce((sum, { count }) => sum + count, 0);

/** Return the table for the plots of two reports; `open` is called with the path of the module that was clicked. */
export function differenceTable(pictures, open) {
  let rows = [];
  const difference = (i) => (rows[i].there || 0) - (rows[i].here || 0);
  const number = (key, title, read, write) => ({ key, title, number: true, value: read, write: (cell, i) => cell.append(write(i)) });
  const table = new Table(byId("differences"), {
    caption: "Differences by module",
    sort: { key: "size", descending: true },
    rows: () => {
      rows = collectRows(pictures[0].nodes, pictures[1].nodes, widthKey());
      table.equal = countOf(rows.filter(isEqual));
      table.different = countOf(rows.filter((row) => !isEqual(row) && row.here !== null && row.there !== null));
      if (!view.showEqual) rows = rows.filter((row) => !isEqual(row));
      return rows.map((_, i) => i);
    },
    columns: () => {
      const unit = measureOf().unit;
      const side = (name) => (i) => (rows[i][name] === null ? "missing" : short(rows[i][name], unit));
      const [first, second] = namesOf().map((name) => (name.length > LONGEST ? `…${name.slice(-LONGEST)}` : name));
      return [
        text("name", "Module", (i) => (rows[i].path || "the whole model") + (rows[i].count > 1 ? ` × ${rows[i].count}` : "")),
        number("here", first, (i) => rows[i].here || 0, side("here")),
        number("there", second, (i) => rows[i].there || 0, side("there")),
        { ...number("size", "Difference", (i) => Math.abs(difference(i)), (i) => signed(difference(i), unit)), exact: difference },
        number("ratio", "Change", (i) => difference(i) / (rows[i].here || 1), (i) => changeOf(rows[i], difference(i))),
      ];
    },
    open: (i) => open(rows[i].first),
  });
  return table;
}

function changeOf({ here, there }, difference) {
  if (there === null) return "removed";
  if (here === null) return "new";
  if (!difference) return "equal";
  return here ? signedPercent(difference, here) : "from 0";
}

const signedPercent = (part, whole) => (part < 0 ? `−${percent(-part, whole)}` : `+${percent(part, whole)}`);
