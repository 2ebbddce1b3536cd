// The table of modules that differ between two reports.
import { byId } from "../base/elements.js";
import { percent, short, signed } from "../base/numbers.js";
import { measureOf, moduleValue, namesOf, reports, view, widthKey } from "../data/view.js";
import { Table, text } from "./table.js";

const LONGEST = 28; // letters of a name in a heading

/** Return a row for each module of either report: {path, here, there}, a value being null where a report lacks it. */
export function collectRows(here, there, key) {
  const of = (report, path) => {
    const module = report.find(path);
    return module === undefined || !report.measures.has(key) ? null : moduleValue(report, key, module);
  };
  return [...new Set([...here.paths, ...there.paths])].map((path) => ({ path, here: of(here, path), there: of(there, path) }));
}

/** Return the table; `open` is called with the path of the module whose name was clicked. */
export function differenceTable(open) {
  let rows = [];
  const difference = (i) => (rows[i].there || 0) - (rows[i].here || 0);
  const number = (key, title, read, write) => ({ key, title, number: true, value: read, write: (cell, i) => cell.append(write(i)) });
  const table = new Table(byId("differences"), {
    caption: "Differences by module",
    sort: { key: "size", descending: true },
    rows: () => {
      rows = collectRows(reports[0], reports[1], widthKey());
      const isEqual = ({ here, there }) => here === there;
      table.equal = rows.filter(isEqual).length;
      table.different = rows.filter((row) => !isEqual(row) && row.here !== null && row.there !== null).length;
      if (!view.showEqual) rows = rows.filter((row) => !isEqual(row));
      return rows.map((_, i) => i);
    },
    columns: () => {
      const unit = measureOf().unit;
      const side = (name) => (i) => (rows[i][name] === null ? "missing" : short(rows[i][name], unit));
      const [first, second] = namesOf().map((name) => (name.length > LONGEST ? `…${name.slice(-LONGEST)}` : name));
      return [
        text("name", "Module", (i) => rows[i].path || "the whole model"),
        number("here", first, (i) => rows[i].here || 0, side("here")),
        number("there", second, (i) => rows[i].there || 0, side("there")),
        { ...number("size", "Difference", (i) => Math.abs(difference(i)), (i) => signed(difference(i), unit)), exact: difference },
        number("ratio", "Change", (i) => difference(i) / (rows[i].here || 1), (i) => changeOf(rows[i], difference(i))),
      ];
    },
    open: (i) => open(rows[i].path),
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
