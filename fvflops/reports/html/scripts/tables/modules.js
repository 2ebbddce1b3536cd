// The table of all modules in every measure.
import { byId } from "../base/elements.js";
import { plural } from "../base/numbers.js";
import { formatModule, keysOf, moduleValue, reports, titleOf, view, widthKey } from "../data/view.js";
import { Table, shareColumn, text } from "./table.js";

function moduleColumns() {
  const [report] = reports;
  const columns = [text("name", "Module", (i) => report.paths[i] || report.title), text("class", "Class", (i) => report.classOf(i))];
  for (const key of keysOf(report)) {
    columns.push({
      key,
      title: titleOf(key),
      number: true,
      value: (i) => moduleValue(report, key, i),
      exact: (i) => exactly(report, key, i),
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

/** Return every digit of a value, which Number holds up to 2^53. */
function exactly(report, key, module) {
  const value = moduleValue(report, key, module);
  return Number.isSafeInteger(value) || key === "rate" ? value : report.exactly(key, view, [module]);
}

function moduleRows() {
  const [report] = reports;
  const hits = report.search(view.query);
  const rows = [];
  for (let i = 0; i < report.size; i++) if (!hits || hits[i] & 1) rows.push(i);
  return rows;
}

/** Return the table; `open` is called with the module whose name was clicked. */
export function moduleTable(open) {
  return new Table(byId("module-table"), {
    caption: "Modules, submodules included",
    sort: { key: "share", descending: true },
    columns: moduleColumns,
    rows: moduleRows,
    open,
  });
}
