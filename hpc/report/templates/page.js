// Puts the figures in place and sorts tables.
"use strict";

async function drawPlots() {
  const {document: model, elements} = JSON.parse(document.getElementById("plots").textContent);
  await Bokeh.embed.embed_items({report: model}, [{docid: "report", roots: elements, root_ids: Object.keys(elements)}]);
  const figures = Bokeh.documents[0].roots();
  // A drag by a finger scrolls the page, not the figure.
  if (matchMedia("(pointer: coarse)").matches) for (const figure of figures) figure.toolbar.active_drag = null;
}

function compare(one, other) {
  return isNaN(one) || isNaN(other) ? one.localeCompare(other, "en", {numeric: true}) : one - other;
}

function makeSortable(table) {
  const headers = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const down = header.ariaSort === "descending";
      for (const other of headers) other.ariaSort = null;
      header.ariaSort = down ? "ascending" : "descending";
      const rows = [...body.rows], known = rows.filter(row => value(row, column) !== "");
      known.sort((one, other) => compare(value(other, column), value(one, column)));
      body.append(...(down ? known.reverse() : known), ...rows.filter(row => !known.includes(row)));
    });
  });
}

for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
if (document.getElementById("plots")) drawPlots();
