// The page of models: a box that filters the rows by name, and headings that sort them. Without this the tables are whole.
"use strict";

(() => {
  const MULTIPLES = { "": 1, K: 1e3, M: 1e6, G: 1e9, B: 1e9, T: 1e12, P: 1e15 };

  // The number that a cell such as "25.6M" or "4.97 GB" shows; NaN for a text.
  function readNumber(text) {
    const found = /^([\d.,]+)\s*([KMGTPB]?)B?$/.exec(text.trim().replace("bytes", ""));
    return found ? Number(found[1].replaceAll(",", "")) * MULTIPLES[found[2]] : NaN;
  }

  // Compare two texts: as numbers where both are, and numbers after everything else.
  function compare(a, b) {
    const [x, y] = [readNumber(a), readNumber(b)];
    if (Number.isNaN(x) && Number.isNaN(y)) return a.localeCompare(b, "en", { numeric: true });
    return Number.isNaN(x) ? -1 : Number.isNaN(y) ? 1 : x - y;
  }

  function sortTables(tables, column, descending) {
    for (const table of tables) {
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => compare(a.cells[column].textContent, b.cells[column].textContent));
      if (descending) rows.reverse();
      table.tBodies[0].append(...rows);
      [...table.tHead.rows[0].cells].forEach((cell, index) => {
        if (index === column) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      });
    }
  }

  function addSorting(tables) {
    for (const table of tables) {
      [...table.tHead.rows[0].cells].forEach((cell, column) => {
        const button = document.createElement("button");
        button.type = "button";
        button.append(...cell.childNodes);
        // Names ascend first; of numbers the largest are asked for.
        button.addEventListener("click", () => {
          const before = cell.getAttribute("aria-sort");
          const cells = [...table.tBodies[0].rows].map((row) => row.cells[column].textContent);
          const hasNumbers = cells.some((text) => !Number.isNaN(readNumber(text)));
          sortTables(tables, column, before ? before === "ascending" : hasNumbers);
        });
        cell.append(button);
      });
    }
  }

  function addFilter(heading, tables) {
    const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
    const names = rows.map((row) => row.cells[0].textContent.toLowerCase());
    const form = document.createElement("form");
    form.className = "catalogue-filter";
    form.setAttribute("role", "search");
    form.innerHTML =
      '<input type="search" aria-label="Filter models by name" placeholder="Filter by name: vit base 224">' +
      '<output aria-live="polite"></output>';
    const [input, output] = form.children;
    const filter = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, index) => {
        row.hidden = !words.every((word) => names[index].includes(word));
        shown += row.hidden ? 0 : 1;
      });
      output.textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} models`;
    };
    input.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    heading.before(form);
    filter();
  }

  document.addEventListener("DOMContentLoaded", () => {
    const article = document.getElementById("models")?.parentElement;
    const tables = article ? [...article.querySelectorAll("table")] : [];
    if (!tables.length) return;
    addSorting(tables);
    addFilter(article.querySelector("h2"), tables);
  });
})();
