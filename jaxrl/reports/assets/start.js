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
window.addEventListener("beforeprint", () => {
  for (const group of document.querySelectorAll(".group")) group.open = true;
  drawAll();
});
