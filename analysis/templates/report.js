"use strict";
// Tables sort by a click on a head and filter by the words typed; the page filters by the values picked.

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

const picks = [...document.querySelectorAll("select[data-pick]")];

// Of a pick's values, those that a text names: whole words, and a backbone also as "dit-T/1".
function named(pick, text) {
  const words = text.split(/[\s,;:()]+/), model = pick.dataset.pick === "Backbone";
  const values = [...pick.options].map((option) => option.value).filter(Boolean);
  return values.filter((value) => words.some((word) => word === value || (model && word.startsWith(value + "-"))));
}

// What names another value is left out; what names none (a dense run has no route) stays.
function isPicked(own, heading) {
  return picks.every((pick) => {
    if (!pick.value) return true;
    let found = named(pick, own);
    if (!found.length && !(pick.dataset.pick === "Route" && own.includes("dense"))) found = named(pick, heading);
    return !found.length || found.includes(pick.value);
  });
}

function filterTable(block) {
  const table = block.querySelector("table.data");
  const search = block.querySelector("input[type=search]");
  const words = search ? search.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
  let shown = 0, total = 0;
  for (const body of table.tBodies) {
    const group = body.querySelector("tr.group");
    const heading = group ? group.textContent : "";
    let visible = 0;
    for (const row of body.rows) {
      if (row === group) continue;
      total += 1;
      const own = [...row.cells].map((cell) => cell.textContent).join(" ");
      const text = (heading + " " + own).toLowerCase();
      row.hidden = !(isPicked(own, heading) && words.every((word) => text.includes(word)));
      if (!row.hidden) visible += 1;
    }
    if (group) group.hidden = visible === 0;
    shown += visible;
  }
  const count = block.querySelector(".count");
  if (count) count.textContent = shown === total ? total + " rows" : shown + " of " + total + " rows";
}

function filterPage() {
  document.querySelectorAll("[data-table]").forEach(filterTable);
  for (const item of document.querySelectorAll("[data-about]")) item.hidden = !isPicked(item.textContent, "");
}

for (const table of document.querySelectorAll("table.data")) {
  [...table.tHead.rows[0].cells].forEach((head, column) =>
    head.querySelector("button").addEventListener("click", () => sortTable(table, column)));
}
for (const block of document.querySelectorAll("section.block[data-table]")) {
  block.querySelector("input[type=search]").addEventListener("input", () => filterTable(block));
}
picks.forEach((pick) => pick.addEventListener("change", filterPage));
filterPage();
document.documentElement.dataset.ready = "yes";
