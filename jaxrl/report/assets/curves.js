// Charts of metrics over steps: raw points, a smoothed line over them, 95% intervals, a cursor.

const HEIGHT = 164;
const EDGE = { left: 48, right: 8, top: 6, bottom: 34 };
const FEW = 20; // points whose scale shows every one of them
const HALF_LIVES = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

/** What holds for every chart. */
const shown = { halfLife: 0, log: false, align: false, from: -Infinity, to: Infinity };

/** A mean in which a point weighs half as much after `halfLife` steps. */
function smooth(xs, ys, halfLife) {
  let sum = 0;
  let weight = 0;
  return ys.map((y, i) => {
    const decay = i === 0 ? 0 : 0.5 ** ((xs[i] - xs[i - 1]) / halfLife);
    sum = sum * decay + y;
    weight = weight * decay + 1;
    return sum / weight;
  });
}

/** Powers of ten between two logarithms, or round numbers where there are not two of them. */
function logTicks(low, high) {
  const [first, last] = [Math.ceil(low), Math.floor(high)];
  if (last <= first) return ticks(10 ** low, 10 ** high, 3).filter((value) => value > 0);
  return ticks(first, last, 3).filter(Number.isInteger).map((power) => 10 ** power);
}

/** The ends of the scale: single points far away from all others do not flatten the rest. */
function reach(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const [low, high] = [at(0.02), at(0.98)];
  const far = 3 * (high - low);
  if (sorted.length < FEW || far === 0) return [sorted[0], sorted.at(-1)];
  return [
    sorted[0] < low - far ? low : sorted[0],
    sorted.at(-1) > high + far ? high : sorted.at(-1),
  ];
}

function interval({ low, high }, i) {
  return (low?.[i] ?? null) === null ? "" : ` [${number(low[i])}, ${number(high[i])}]`;
}

class Chart {
  constructor(chart) {
    this.described = chart;
    this.name = chart.name;
    this.align();
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    this.beyond = element("em");
    this.svg = svg("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": this.label() });
    this.node = element(
      "figure",
      { class: "chart", "data-metric": chart.name },
      element("figcaption", {}, element("b", {}, chart.name), ` ${chart.unit} `, this.beyond),
      element(
        "div",
        { class: "under" },
        element("p", { class: "meaning", title: chart.meaning }, chart.meaning),
        this.readout,
      ),
      this.svg,
    );
    this.svg.addEventListener("pointermove", (event) => this.pointAt(event));
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("blur", () => this.show(null));
    this.svg.addEventListener("pointerdown", (event) => (this.pressed = this.stepAt(event)));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("dblclick", () => setRange(-Infinity, Infinity));
    this.svg.addEventListener("keydown", (event) => this.press(event));
  }

  /** The series over steps, or each over its share of its run. */
  align() {
    const place = ({ run }, x) => (shown.align ? (100 * x) / lastStep(run) : x);
    const placed = (series) => ({
      ...series,
      steps: series.mx ?? series.x, // what smoothing counts, whatever the scale shows
      x: series.x.map((x) => place(series, x)),
      mx: series.mx?.map((x) => place(series, x)),
      lost: series.lost.map((x) => place(series, x)),
    });
    this.chart = { ...this.described, series: this.described.series.map(placed) };
    this.steps = [...new Set(this.chart.series.flatMap((s) => s.x))].sort((a, b) => a - b);
  }

  label() {
    const ends = this.chart.series.map(({ run, x, y }) => {
      if (!x.length) return `${data.runs[run]}: nothing finite`;
      const [first, last] = [number(y[0]), number(y.at(-1))];
      return `${data.runs[run]}: ${first} at step ${x[0]}, ${last} at step ${x.at(-1)}`;
    });
    return `${this.chart.name} over steps. ${ends.join("; ")}`;
  }

  draw() {
    const width = this.node.clientWidth;
    if (!width) return; // in a group that is closed
    const lines = this.chart.series.map((series) => this.lineOf(series));
    const inside = [];
    for (const line of lines) {
      for (const [i, x] of line.x.entries()) {
        if (x < shown.from || x > shown.to) continue;
        inside.push(line.y[i]);
        if (line.low) inside.push(line.low[i] ?? line.y[i], line.high[i] ?? line.y[i]);
      }
    }
    for (const level of this.chart.levels ?? []) inside.push(level.y);
    this.setScales(width, inside);
    const parts = [this.axes(width), this.evaluations()];
    parts.push(...this.levels(width));
    for (const line of lines) parts.push(this.line(line));
    this.cursor = svg("g", { class: "cursor" });
    const frame = { x: EDGE.left - 3, y: 0, width, height: HEIGHT - EDGE.bottom + 4 };
    const id = `frame-${this.name}`;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(
      svg("clipPath", { id }, svg("rect", frame)),
      parts[0],
      svg("g", { "clip-path": `url("#${id}")` }, ...parts.slice(1), this.cursor),
    );
  }

  /** The points of a series that the scale can show, and its smoothed line. */
  lineOf(series) {
    const fits = (y) => !shown.log || y > 0;
    const kept = [...series.x.keys()].filter((i) => fits(series.y[i]));
    const pick = (values) => values && kept.map((i) => values[i]);
    const line = { run: series.run, lost: series.lost, marked: Boolean(series.low) };
    line.x = pick(series.x);
    line.y = pick(series.y);
    line.low = pick(series.low);
    line.high = pick(series.high);
    if (shown.halfLife && !line.marked) {
      const [mx, my] = [series.mx ?? series.x, series.my ?? series.y];
      line.smooth = { x: mx, y: smooth(series.steps, my, shown.halfLife) };
    }
    return line;
  }

  setScales(width, values) {
    const [first, last] = [this.steps[0] ?? 0, this.steps.at(-1) ?? 1];
    const from = Math.max(first, shown.from);
    const to = Math.max(Math.min(last, shown.to), from + 1);
    const turn = shown.log ? Math.log10 : (y) => y;
    const usable = values.filter((y) => !shown.log || y > 0).map(turn);
    const [low, high] = usable.length ? reach(usable) : [0, 1];
    const beyond = usable.filter((y) => y < low || y > high).length;
    this.beyond.textContent = beyond ? `${beyond} beyond the scale` : "";
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    this.range = { from, to, low: low - room, high: high + room };
    const [w, h] = [width - EDGE.left - EDGE.right, HEIGHT - EDGE.top - EDGE.bottom];
    this.x = (step) => EDGE.left + ((step - from) / (to - from)) * w;
    this.y = (y) => EDGE.top + (1 - (turn(y) - low + room) / (high - low + 2 * room)) * h;
    this.stepOf = (x) => from + ((x - EDGE.left) / w) * (to - from);
  }

  axes(width) {
    const { from, to, low, high } = this.range;
    const group = svg("g", { class: "axes" });
    const bottom = HEIGHT - EDGE.bottom;
    for (const value of shown.log ? logTicks(low, high) : ticks(low, high, 5)) {
      const y = this.y(value);
      group.append(
        svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y, y2: y }),
        svg("text", { x: EDGE.left - 5, y: y + 3.5, "text-anchor": "end" }, number(value)),
      );
    }
    for (const step of ticks(from, to, Math.max(2, width / 90)).filter(Number.isInteger)) {
      const x = this.x(step);
      const place = x > width - 24 ? "end" : "middle";
      group.append(
        svg("line", { x1: x, x2: x, y1: bottom, y2: bottom + 3 }),
        svg("text", { x, y: bottom + 15, "text-anchor": place }, number(step)),
      );
    }
    const middle = (EDGE.left + width - EDGE.right) / 2;
    const title = shown.align ? "% of the run" : "step";
    group.append(svg("text", { x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, title));
    return group;
  }

  /** Small ticks where the run was evaluated, red ones where a value was not finite, and a line
   * where the run resumed with changes. */
  evaluations() {
    const bottom = HEIGHT - EDGE.bottom;
    const group = svg("g", {});
    const mark = (step, name, length) => {
      const x = this.x(step);
      group.append(svg("line", { class: name, x1: x, x2: x, y1: bottom - length, y2: bottom }));
    };
    for (const { run, lost } of this.chart.series) {
      const place = (step) => (shown.align ? (100 * step) / lastStep(run) : step);
      for (const step of data.evaluated[run]) mark(place(step), "evaluated", 4);
      for (const step of data.changed[run]) mark(place(step), "changed", bottom - EDGE.top);
      for (const step of lost) mark(step, "lost", 9);
    }
    return group;
  }

  /** Dashed lines, each with its label below it, or below the label that stands there. */
  levels(width) {
    const end = width - EDGE.right;
    let free = 0;
    const found = this.chart.levels ?? [];
    const heights = [...new Set(found.map(({ y }) => y))].sort((a, b) => b - a);
    return heights.map((y) => {
      const same = found.filter((level) => level.y === y);
      const [{ run, label }] = same;
      const at = this.y(y);
      const foot = Math.max(at + 11, free);
      free = foot + 12;
      const names = heights.length > 1 ? `${same.map((s) => data.runs[s.run]).join(", ")}: ` : "";
      const text = `${names}${label} ${number(y)}`;
      return svg(
        "g",
        { class: `level run${run % 8}` },
        svg("line", { x1: EDGE.left, x2: end, y1: at, y2: at }),
        svg("text", { x: EDGE.left + 4, y: foot }, text),
      );
    });
  }

  line(line) {
    const point = (x, y) => `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`;
    const path = (xs, ys) => xs.map((x, i) => `${i ? "L" : "M"}${point(x, ys[i])}`).join("");
    const kind = line.smooth ? "raw faint" : "raw";
    const group = svg("g", { class: `series run${line.run % 8}` });
    group.append(svg("path", { class: kind, d: path(line.x, line.y) }));
    if (line.marked || line.x.length === 1) {
      for (const [i, step] of line.x.entries()) {
        const [x, y] = [this.x(step), this.y(line.y[i])];
        if (Number.isFinite(line.low?.[i] ?? NaN) && (!shown.log || line.low[i] > 0)) {
          const ends = { y1: this.y(line.low[i]), y2: this.y(line.high[i]) };
          group.append(svg("line", { class: "interval", x1: x, x2: x, ...ends }));
        }
        group.append(svg("circle", { cx: x, cy: y, r: 2.5 }));
      }
    }
    if (data.runs.length > 1 && line.x.length) {
      // Where the run ends: a short one is seen beside a long one.
      const [x, y] = [this.x(line.x.at(-1)), this.y(line.y.at(-1))];
      group.append(svg("circle", { class: "end", cx: x, cy: y, r: 3 }));
    }
    if (line.smooth) {
      group.append(svg("path", { class: "smooth", d: path(line.smooth.x, line.smooth.y) }));
    }
    return group;
  }

  stepAt(event) {
    const box = this.svg.getBoundingClientRect();
    return this.stepOf(((event.clientX - box.left) / box.width) * this.node.clientWidth);
  }

  pointAt(event) {
    if (this.steps.length) this.show(nearest(this.steps, this.stepAt(event)));
  }

  /** A drag over the chart shows those steps in all charts. */
  release(event) {
    const [from, to] = [this.pressed, this.stepAt(event)].sort((a, b) => a - b);
    const dragged = Math.abs(this.x(to) - this.x(from)) > 8;
    if (this.pressed !== undefined && dragged) setRange(Math.round(from), Math.round(to));
    this.pressed = undefined;
  }

  press(event) {
    const last = this.steps.length - 1;
    const arrows = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    const moves = { ...arrows, Home: -last, End: last };
    if (event.key === "Escape") this.show(null);
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    this.show(clamp((this.at ?? -1) + moves[event.key], 0, last));
  }

  /** The cursor at the step of this number, and what the curves are there. */
  show(index) {
    this.at = index;
    this.cursor?.replaceChildren();
    this.readout.textContent = "";
    if (index === null || !this.cursor) return;
    const step = this.steps[index];
    const x = this.x(step);
    this.cursor.append(svg("line", { x1: x, x2: x, y1: 0, y2: HEIGHT - EDGE.bottom }));
    const parts = [shown.align ? `${number(step)}% of the run` : `step ${step}`];
    for (const series of this.chart.series) {
      // Over their own lengths runs have no step in common: of each the nearest.
      const i = shown.align ? nearest(series.x, step) : series.x.indexOf(step);
      if (i < 0 || i >= series.x.length) continue;
      const name = data.runs.length > 1 ? `${data.runs[series.run]} ` : "";
      parts.push(`${name}${number(series.y[i])}${interval(series, i)}`);
      if (!shown.log || series.y[i] > 0) {
        const place = { cx: this.x(series.x[i]), cy: this.y(series.y[i]), r: 3 };
        this.cursor.append(svg("circle", { class: `run${series.run % 8}`, ...place }));
      }
    }
    this.readout.textContent = parts.join(" · ");
  }
}

/** The last step of a run that any chart has. */
function lastStep(run) {
  if (!lastStep.known) {
    const series = data.groups.flatMap((group) => group.charts.flatMap((chart) => chart.series));
    const last = (one) => Math.max(1, ...series.filter((s) => s.run === one).map((s) => s.x.at(-1) ?? 0));
    lastStep.known = data.runs.map((_, one) => last(one));
  }
  return lastStep.known[run];
}

const charts = [];

function drawCharts() {
  for (const chart of charts) chart.draw();
}

function setRange(from, to) {
  [shown.from, shown.to] = [from, to];
  control("from").value = Number.isFinite(from) ? from : "";
  control("to").value = Number.isFinite(to) ? to : "";
  drawCharts();
}

/** Only what has these words in its name or meaning; groups with a hit are opened. */
function filterCharts(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const hit = (node) => words.every((word) => node.textContent.toLowerCase().includes(word));
  for (const group of document.querySelectorAll(".group")) {
    const nodes = [...group.querySelectorAll("figure, .constants tbody tr")];
    for (const node of nodes) node.hidden = !hit(node);
    group.hidden = nodes.every((node) => node.hidden);
    if (words.length && !group.hidden) group.open = true;
  }
  drawCharts();
}

function startCurves() {
  for (const [index, group] of data.groups.entries()) {
    const place = document.querySelector(`.group[data-group="${index}"] .charts`);
    for (const described of group.charts) {
      const chart = new Chart(described);
      charts.push(chart);
      place.append(chart.node);
    }
  }
  for (const group of document.querySelectorAll(".group")) {
    group.addEventListener("toggle", drawCharts);
  }
  const last = Math.max(1, ...charts.flatMap((chart) => chart.steps.at(-1) ?? 1));
  const lives = HALF_LIVES.filter((life) => life <= last / 2);
  control("smooth").max = lives.length - 1;
  control("smooth").addEventListener("input", (event) => {
    shown.halfLife = lives[event.target.value];
    const text = shown.halfLife ? `half-life ${shown.halfLife} steps` : "off";
    document.getElementById("smooth-text").textContent = text;
    drawCharts();
  });
  control("log").addEventListener("change", (event) => {
    shown.log = event.target.checked;
    drawCharts();
  });
  control("align")?.addEventListener("change", (event) => {
    shown.align = event.target.checked;
    for (const chart of charts) chart.align();
    setRange(-Infinity, Infinity);
  });
  const [from, to] = [control("from"), control("to")];
  const asked = ({ value }, otherwise) => (value === "" ? otherwise : Number(value));
  for (const field of [from, to]) {
    field.addEventListener("change", () => setRange(asked(from, -Infinity), asked(to, Infinity)));
  }
  control("metric").addEventListener("input", (event) => filterCharts(event.target.value));
  drawCharts();
}
