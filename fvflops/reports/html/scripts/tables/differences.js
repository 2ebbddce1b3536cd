// The table of modules that differ between two reports.
import { byId } from "../base/elements.js";
import { percent, short } from "../base/numbers.js";
import { measureOf, moduleValue, reports, widthKey } from "../data/view.js";
import { Table, text } from "./table.js";

/** Return the table; `open` is called with the path of the module whose name was clicked. */
export function differenceTable(open) {
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
    open: (i) => open(rows[i].path),
  });
}
