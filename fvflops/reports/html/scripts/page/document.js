// A report of tables: light and dark, rows sorted by a column, and a search.
import { byId, make } from "../base/elements.js";
import { listenToTheme } from "./theme.js";

const FEW = 8; // rows, which need no search
const ORDERS = ["descending", "ascending", ""];
const rowsOf = (table) => [...table.tBodies[0].rows];
const nameOf = (cell) => cell.dataset.name ?? cell.textContent;

function valueOf(row, column, isText) {
  const cell = row.cells[column];
  if (isText) return nameOf(cell);
  return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
}

function compare(first, second) {
  if (first === null || second === null) return 0;
  return typeof first === "string" ? -first.localeCompare(second, "en", { numeric: true }) : first - second;
}

/** Sort the rows by a column: largest or first name first, the other way round, then as they were. */
function sortBy(table, column, original) {
  const header = table.tHead.rows[0].cells[column];
  const isText = header.classList.contains("text");
  const order = ORDERS[(ORDERS.indexOf(header.getAttribute("aria-sort") ?? "") + 1) % ORDERS.length];
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  if (order) header.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const rows = order ? [...original] : original;
  if (order) {
    const values = new Map(rows.map((row) => [row, valueOf(row, column, isText)]));
    const missing = (row) => Number(values.get(row) === null);
    rows.sort((a, b) => missing(a) - missing(b) || sign * compare(values.get(a), values.get(b)));
  }
  // Below other rows than their parents', modules have their whole names.
  for (const row of rows) for (const cell of row.cells) if ("name" in cell.dataset) cell.textContent = order ? cell.dataset.name : cell.dataset.short;
  table.tBodies[0].append(...rows);
}

function makeSortable(table) {
  const original = rowsOf(table);
  for (const cell of table.querySelectorAll("[data-name]")) cell.dataset.short = cell.textContent;
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = make("button", { type: "button", title: "Sort by this column", on: { click: () => sortBy(table, column, original) } }, cell.textContent);
    cell.replaceChildren(button);
  });
}

function search(tables) {
  const query = byId("search").value.trim().toLowerCase();
  for (const row of tables.flatMap(rowsOf)) row.hidden = query !== "" && ![...row.cells].some((cell) => `${cell.textContent} ${nameOf(cell)}`.toLowerCase().includes(query));
}

const tables = [...document.querySelectorAll("table")];
listenToTheme();
tables.filter((table) => rowsOf(table).length > 1).forEach(makeSortable);
byId("theme").hidden = false;
byId("search-label").hidden = tables.every((table) => rowsOf(table).length <= FEW);
byId("search").addEventListener("input", () => search(tables));
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input")) return;
  event.preventDefault();
  byId("search").focus();
});
