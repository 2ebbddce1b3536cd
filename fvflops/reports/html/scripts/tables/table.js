// Tables that can be sorted by each column.
import { isolate, make } from "../base/elements.js";
import { percent, plural, thousands } from "../base/numbers.js";
import { measureOf, moduleValue, reports, widthKey } from "../data/view.js";

const FIRST_ROWS = 50;
const MORE_ROWS = 500;

export class Table {
  /**
   * `columns` are {key, title, value, write, number, exact}, `exact` being the value in a file. `rows` returns the indexes
   * of rows, given whether it is for a file; `open` is called with one.
   */
  constructor(box, { caption, columns, rows, open, sort }) {
    Object.assign(this, { box, caption, columns, rows, open, sort });
    this.limit = FIRST_ROWS;
  }

  draw(keepLimit = false) {
    if (!keepLimit) this.limit = FIRST_ROWS;
    const columns = this.columns();
    const sorted = this.sortedColumn(columns);
    const rows = this.sortedRows(columns);
    const shown = rows.slice(0, this.limit);
    const head = make("tr", {}, ...columns.map((column) => this.drawHeading(column, sorted)));
    const body = make("tbody", {}, ...shown.map((row) => this.drawRow(row, columns)));
    const left = rows.length - shown.length;
    const more = left
      ? make("button", { type: "button", class: "button more", on: { click: () => this.showMore() } }, `Show ${thousands(Math.min(left, MORE_ROWS))} more of ${thousands(rows.length)}`)
      : null;
    const rest = left ? make("p", { class: "hint rest-of-rows" }, `and ${plural(left, "more row")}, shown in the browser`) : null;
    const table = make("table", { "aria-rowcount": rows.length + 1 }, make("caption", { class: "hidden" }, this.caption), make("thead", {}, head), body);
    this.box.replaceChildren(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": this.caption }, table), ...(more ? [more, rest] : []));
  }

  sortedColumn(columns) {
    return columns.find(({ key }) => key === this.sort.key) || columns[0];
  }

  sortedRows(columns, forFile = false) {
    const sorted = this.sortedColumn(columns);
    const rows = this.rows(forFile);
    const values = new Map(rows.map((row) => [row, sorted.value(row)]));
    const sign = this.sort.descending ? -1 : 1;
    const compare = sorted.number ? (a, b) => a - b : (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    return rows.sort((a, b) => sign * compare(values.get(a), values.get(b)) || a - b);
  }

  /** Return all rows as CSV, in the order shown and with exact numbers. */
  toCsv() {
    const columns = this.columns();
    const rows = this.sortedRows(columns, true);
    const lines = [columns.map(({ title }) => title), ...rows.map((row) => columns.map((column) => (column.exact || column.value)(row)))];
    return lines.map((cells) => cells.map(quote).join(",")).join("\r\n") + "\r\n";
  }

  drawHeading(column, sorted) {
    const direction = column === sorted ? (this.sort.descending ? "descending" : "ascending") : undefined;
    const mark = direction ? (this.sort.descending ? " ↓" : " ↑") : "";
    return make(
      "th",
      { scope: "col", class: column.number ? "number" : undefined, "aria-sort": direction },
      make("button", { type: "button", "data-key": column.key, on: { click: () => this.sortBy(column) } }, column.title + mark),
    );
  }

  drawRow(row, columns) {
    return make(
      "tr",
      {},
      ...columns.map((column, index) => {
        const cell = make(index ? "td" : "th", { scope: index ? undefined : "row", class: column.number ? "number" : "name" });
        column.write(cell, row);
        if (!index && this.open) {
          const button = make("button", { type: "button", class: "open", title: cell.title, on: { click: () => this.open(row) } }, ...cell.childNodes);
          cell.replaceChildren(button);
        }
        return cell;
      }),
    );
  }

  sortBy(column) {
    const descending = this.sort.key === column.key ? !this.sort.descending : Boolean(column.number);
    this.sort = { key: column.key, descending };
    this.draw();
    this.box.querySelector(`thead button[data-key="${column.key}"]`).focus();
  }

  showMore() {
    const from = this.limit;
    this.limit += MORE_ROWS;
    this.draw(true);
    const next = this.box.querySelectorAll("tbody tr")[from];
    next?.querySelector("button")?.focus();
  }
}

/** Return a cell of a CSV file. */
const quote = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));

export const text = (key, title, read) => ({
  key,
  title,
  value: (row) => read(row),
  write: (cell, row) => {
    cell.title = read(row);
    cell.append(isolate(read(row).slice(0, 400)));
  },
});

export function shareColumn(value, unsupported = () => 0) {
  return {
    key: "share",
    title: `% of ${measureOf()?.title}`,
    number: true,
    value,
    exact: (row) => percent(value(row), moduleValue(reports[0], widthKey(), 0)),
    write: (cell, row) => {
      const total = moduleValue(reports[0], widthKey(), 0);
      const share = total ? (100 * value(row)) / total : 0;
      cell.classList.add("sharecell");
      cell.style.setProperty("--share", `${Math.min(share, 100).toFixed(2)}%`);
      cell.append(unsupported(row) && !value(row) ? "unsupported" : percent(value(row), total));
    },
  };
}
