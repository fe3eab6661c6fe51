// Starts every part of the page, and draws again when its width or its colours change.

startCurves();
const timeline = startTimeline();
startSamples();

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
