"use strict";
// Tables sort by a click on a head and filter by the words typed; nothing else happens here.

function valueOf(cell) {
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  return cell.textContent.trim();
}

function compare(a, b, sign) {
  const numberA = typeof a === "number", numberB = typeof b === "number";
  // Numbers first, words (missing, not reached) always last.
  if (numberA !== numberB) return numberA ? -1 : 1;
  if (numberA) return sign * (a - b);
  return sign * a.localeCompare(b, "en", { numeric: true });
}

function sortTable(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const direction = heads[column].getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  heads.forEach((head, i) => head.setAttribute("aria-sort", i === column ? direction : "none"));
  const sign = direction === "ascending" ? 1 : -1;
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
    rows.sort((a, b) => compare(valueOf(a.cells[column]), valueOf(b.cells[column]), sign));
    rows.forEach((row) => body.append(row));
  }
}

function filterTable(block) {
  const table = block.querySelector("table.data");
  const words = block.querySelector("input[type=search]").value.toLowerCase().split(/\s+/).filter(Boolean);
  const picks = [...block.querySelectorAll("select[data-column]")].filter((pick) => pick.value !== "");
  let shown = 0, total = 0;
  for (const body of table.tBodies) {
    const group = body.querySelector("tr.group");
    const heading = group ? group.textContent.toLowerCase() : "";
    let visible = 0;
    for (const row of body.rows) {
      if (row === group) continue;
      total += 1;
      const text = heading + " " + row.textContent.toLowerCase();
      const picked = picks.every((pick) => row.cells[Number(pick.dataset.column)].textContent === pick.value);
      row.hidden = !(picked && words.every((word) => text.includes(word)));
      if (!row.hidden) visible += 1;
    }
    if (group) group.hidden = visible === 0;
    shown += visible;
  }
  block.querySelector(".count").textContent = shown === total ? total + " rows" : shown + " of " + total + " rows";
}

for (const table of document.querySelectorAll("table.data")) {
  [...table.tHead.rows[0].cells].forEach((head, column) =>
    head.querySelector("button").addEventListener("click", () => sortTable(table, column)));
}
for (const block of document.querySelectorAll("section.block[data-table]")) {
  block.querySelector("input[type=search]").addEventListener("input", () => filterTable(block));
  block.querySelectorAll("select[data-column]").forEach((pick) => pick.addEventListener("change", () => filterTable(block)));
  filterTable(block);
}
document.documentElement.dataset.ready = "yes";
