// The table of modules in every measure; equal modules are one row.
import { byId } from "../base/elements.js";
import { plural } from "../base/numbers.js";
import { formatValue, keysOf, titleOf, unsupportedOf, valueOf, view, widthKey } from "../data/view.js";
import { Table, shareColumn, text } from "./table.js";

/** Return the table of the nodes of a report; `open` is called with the first module of the row that was clicked. */
export function moduleTable(nodes, open) {
  const { report } = nodes;
  let rows = []; // {members, path}
  return new Table(byId("module-table"), {
    caption: "Modules, submodules included",
    sort: { key: "share", descending: true },
    columns: () => moduleColumns(report, (i) => rows[i]),
    rows: (forFile) => {
      const hits = report.search(view.query);
      const single = forFile || hits;
      rows = single ? report.paths.map((path, i) => ({ members: [i], path })).filter((_, i) => !hits || hits[i] & 1) : nodes.list();
      return rows.map((_, i) => i);
    },
    open: (i) => open(rows[i].members[0], rows[i]),
  });
}

function moduleColumns(report, at) {
  const name = ({ members, path }) => (path || report.title) + (members.length > 1 ? ` × ${members.length}` : "");
  const columns = [text("name", "Module", (i) => name(at(i))), text("class", "Class", (i) => report.classOf(at(i).members[0]))];
  columns.push(
    shareColumn(
      (i) => valueOf(report, widthKey(), at(i).members),
      (i) => unsupportedOf(report, widthKey(), at(i).members),
    ),
  );
  for (const key of keysOf(report)) {
    columns.push({
      key,
      title: titleOf(key),
      number: true,
      value: (i) => valueOf(report, key, at(i).members),
      exact: (i) => exactly(report, key, at(i).members),
      write: (cell, i) => {
        const { members } = at(i);
        cell.append(formatValue(report, key, members));
        cell.classList.toggle("zero", !valueOf(report, key, members));
        cell.classList.toggle("current", key === view.measure);
        const unsupported = key === "rate" ? 0 : unsupportedOf(report, key, members);
        if (unsupported) cell.title = `${plural(unsupported, "unsupported op call")} inside`;
      },
    });
  }
  return columns;
}

/** Return every digit of a value, which Number holds up to 2^53. */
function exactly(report, key, members) {
  const value = valueOf(report, key, members);
  return Number.isSafeInteger(value) || key === "rate" ? value : report.exactly(key, view, members);
}
