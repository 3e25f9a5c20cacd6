// Puts the figures in place, sorts tables and reloads the page of a run that goes on.
"use strict";

async function drawPlots() {
  const {document: model, elements} = JSON.parse(document.getElementById("plots").textContent);
  await Bokeh.embed.embed_items({report: model}, [{docid: "report", roots: elements, root_ids: Object.keys(elements)}]);
  const figures = Bokeh.documents[0].roots();
  // A drag by a finger scrolls the page, not the figure.
  if (matchMedia("(pointer: coarse)").matches) for (const figure of figures) figure.toolbar.active_drag = null;
}

function isZoomed() {
  const range = globalThis.Bokeh?.documents[0]?.roots()[0]?.x_range;
  return range && (range.start !== range.reset_start || range.end !== range.reset_end);
}

function reloadEvery(seconds) {
  setInterval(() => { if (!isZoomed()) location.reload(); }, 1000 * seconds);
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
if (document.body.dataset.reload) reloadEvery(Number(document.body.dataset.reload));
if (document.getElementById("plots")) drawPlots();
