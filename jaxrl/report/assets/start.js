// Starts every part of the page, and draws again when its width or its colours change.

startCurves();
const timeline = startTimeline();
startSamples();

// On a phone a cell stands below its heading.
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  for (const row of table.querySelectorAll("tbody tr")) {
    for (const [i, cell] of [...row.cells].entries()) {
      if (headings[i] && cell.tagName === "TD") cell.dataset.heading = headings[i];
    }
  }
}

function drawAll() {
  drawCharts();
  timeline?.draw();
}

let due = 0;
window.addEventListener("resize", () => {
  cancelAnimationFrame(due);
  due = requestAnimationFrame(drawAll);
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

// On paper every group is open.
let closed = [];
window.addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll(".group:not([open])")];
  for (const group of closed) group.open = true;
  drawAll();
});
window.addEventListener("afterprint", () => {
  for (const group of closed) group.open = false;
});
