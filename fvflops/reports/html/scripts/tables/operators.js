// The table of operators, summed over the model.
import { byId } from "../base/elements.js";
import { short } from "../base/numbers.js";
import { keysOf, reports, titleOf, view, widthKey } from "../data/view.js";
import { Table, shareColumn, text } from "./table.js";

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
    const unsupported = new Float64Array(report.operators.length);
    for (const [row, calls] of measure.unsupported) if (isSelected(row)) unsupported[report.rows.operator[row]] += calls;
    sums.set(key, { sum, unsupported });
  }
  return sums;
}

/** Return the table; `open` is called with the operator whose name was clicked. */
export function operatorTable(open) {
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
      return [...ran].filter((i) => [...sums.values()].some(({ sum, unsupported }) => sum[i] || unsupported[i]));
    },
    columns: () => {
      sums = sumOperators();
      return [
        text("name", "Operator", (i) => report.operators[i] || "''"),
        shareColumn(
          (i) => sums.get(widthKey())?.sum[i] || 0,
          (i) => sums.get(widthKey())?.unsupported[i] || 0,
        ),
        ...keys().map((key) => ({
          key,
          title: titleOf(key),
          number: true,
          value: (i) => value(key, i),
          write: (cell, i) => {
            const unsupported = sums.get(key === "rate" ? "flops" : key).unsupported[i];
            const known = value(key, i);
            cell.append(unsupported && !known ? "unsupported" : (unsupported ? "≥ " : "") + short(known, key === "rate" ? "FLOP/s" : report.measures.get(key).unit));
            cell.classList.toggle("zero", !known && !unsupported);
            cell.classList.toggle("warn", Boolean(unsupported));
            cell.classList.toggle("current", key === view.measure);
          },
        })),
      ];
    },
    open: (i) => open(report.operators[i]),
  });
}
