// The timeline of the pools: a lane for each worker and role, idle gaps, zoom and pan.

const LANE = 17;
const AXIS = 20;
const SHORTEST_VIEW = 1000; // microseconds
const CALLS = 6; // colours; see --call0 ... in page.css

class Timeline {
  constructor(root, timeline) {
    this.timeline = timeline;
    this.canvas = root.querySelector("canvas");
    this.readout = root.querySelector(".readout");
    this.rows = this.makeRows();
    this.colours = this.chooseColours(root.querySelector(".legend"));
    const label = ({ label, title, gaps }) =>
      element("div", { class: gaps ? "pool" : "lane", title }, label);
    root.querySelector(".labels").append(...this.rows.map(label));
    this.view = { from: 0, to: timeline.end };
    this.listen(root);
    this.draw();
  }

  makeRows() {
    const rows = [];
    const lane = (described, pool) => {
      const longest = described.length.reduce((a, b) => Math.max(a, b), 0);
      const title = pool ? `${pool.name} ${described.label}` : described.label;
      rows.push({ ...described, title, longest });
    };
    for (const pool of this.timeline.pools) {
      const [start, length, name] = [0, 1, 2].map((i) => pool.gaps.map((gap) => gap[i]));
      const longest = length.reduce((a, b) => Math.max(a, b), 0);
      const label = { label: pool.name, title: pool.name };
      rows.push({ ...label, gaps: true, start, length, name, longest });
      for (const described of pool.lanes) lane(described, pool);
    }
    for (const described of this.timeline.others) lane(described, null);
    return rows;
  }

  /** The method that a span is about: `update` of `actor.update: update 1/2` on a worker's lane. */
  method(row, name) {
    const text = this.timeline.names[name];
    return row.phases ? text.split(":")[0].split(".").at(-1) : text;
  }

  isWait(name) {
    return /: waiting for arguments$|^idle$/.test(this.timeline.names[name]);
  }

  /** The calls that take most time have a colour each; the legend tells which. */
  chooseColours(legend) {
    const total = new Map();
    for (const row of this.rows.filter((row) => !row.gaps)) {
      for (const [i, name] of row.name.entries()) {
        if (this.isWait(name)) continue;
        const method = this.method(row, name);
        total.set(method, (total.get(method) ?? 0) + row.length[i]);
      }
    }
    const order = [...total.keys()].sort((a, b) => total.get(b) - total.get(a));
    const colours = new Map(order.map((method, i) => [method, Math.min(i, CALLS - 1)]));
    const chip = (kind, text) =>
      element("span", { class: "chip" }, element("i", { class: kind }), text);
    const calls = order.slice(0, CALLS).map((method, i) => (i < CALLS - 1 ? method : "others"));
    legend.append(...calls.map((method, i) => chip(`call${i}`, method)));
    legend.append(chip("wait", "waits for arguments"), chip("gap", "idle"));
    return colours;
  }

  listen(root) {
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.held = { x: event.clientX, ...this.view };
    });
    canvas.addEventListener("pointerup", () => (this.held = null));
    canvas.addEventListener("pointermove", (event) => {
      if (this.held) this.drag(event);
      else this.point(event);
    });
    canvas.addEventListener("pointerleave", () => (this.readout.textContent = ""));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.25, this.timeAt(event)));
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.3 : 1 / 1.3, this.timeAt(event));
      },
      { passive: false },
    );
    const acts = { in: () => this.zoom(0.5), out: () => this.zoom(2), all: () => this.showAll() };
    for (const [name, act] of Object.entries(acts)) {
      root.querySelector(`button[name="zoom-${name}"]`).addEventListener("click", act);
    }
    const [first, last] = [control("step-from"), control("step-to")];
    for (const field of [first, last]) {
      field.addEventListener("change", () => this.showSteps(first.value, last.value));
    }
    for (const button of document.querySelectorAll("button[data-start]")) {
      button.addEventListener("click", () => {
        const [start, length] = [Number(button.dataset.start), Number(button.dataset.length)];
        this.setView(start - length / 2, start + 1.5 * length);
        canvas.scrollIntoView({ block: "center" });
        canvas.focus({ preventScroll: true });
      });
    }
  }

  press(event) {
    const size = this.view.to - this.view.from;
    const acts = {
      ArrowLeft: () => this.setView(this.view.from - size / 5, this.view.to - size / 5),
      ArrowRight: () => this.setView(this.view.from + size / 5, this.view.to + size / 5),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      Home: () => this.showAll(),
    };
    if (!(event.key in acts) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  setView(from, to) {
    const size = clamp(to - from, SHORTEST_VIEW, Math.max(this.timeline.end, SHORTEST_VIEW));
    const start = clamp(from, 0, Math.max(0, this.timeline.end - size));
    this.view = { from: start, to: start + size };
    this.draw();
  }

  showAll() {
    this.setView(0, this.timeline.end);
  }

  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view;
    this.setView(around - (around - from) * factor, around + (to - around) * factor);
  }

  drag(event) {
    const { x, from, to } = this.held;
    const moved = ((event.clientX - x) / this.canvas.clientWidth) * (to - from);
    this.setView(from - moved, to - moved);
  }

  /** From the end of the step before the first to the end of the last; empty is the run's own. */
  showSteps(first, last) {
    const steps = this.timeline.steps;
    const before = steps.filter(([, step]) => first !== "" && step < Number(first)).at(-1);
    const end = steps.find(([, step]) => last !== "" && step >= Number(last));
    this.setView(before ? before[0] : 0, end ? end[0] : this.timeline.end);
  }

  timeAt(event) {
    const { from, to } = this.view;
    const box = this.canvas.getBoundingClientRect();
    return from + ((event.clientX - box.left) / box.width) * (to - from);
  }

  x(time) {
    return ((time - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  draw() {
    this.width = this.canvas.clientWidth;
    if (!this.width) return;
    const height = AXIS + this.rows.length * LANE + AXIS;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(this.canvas);
    const known = new Map();
    const colour = (name) => {
      if (!known.has(name)) known.set(name, style.getPropertyValue(`--${name}`).trim());
      return known.get(name);
    };
    pen.font = `11px ${style.fontFamily}`;
    this.drawAxes(pen, colour, height);
    for (const [number, row] of this.rows.entries()) {
      this.drawRow(pen, colour, row, AXIS + number * LANE);
    }
  }

  drawAxes(pen, colour, height) {
    const { from, to } = this.view;
    pen.strokeStyle = colour("grid");
    pen.fillStyle = colour("muted");
    const line = (x, top, bottom) => {
      pen.beginPath();
      pen.moveTo(Math.round(x) + 0.5, top);
      pen.lineTo(Math.round(x) + 0.5, bottom);
      pen.stroke();
    };
    const place = (text, x) => {
      const size = pen.measureText(text).width;
      return clamp(x - size / 2, 0, this.width - size);
    };
    for (const second of ticks(from / 1e6, to / 1e6, this.width / 90)) {
      const text = `${number(second)} s`;
      line(this.x(second * 1e6), AXIS - 4, height - AXIS);
      pen.fillText(text, place(text, this.x(second * 1e6)), 11);
    }
    let free = 0;
    for (const [at, step] of this.timeline.steps) {
      if (at < from || at > to) continue;
      line(this.x(at), height - AXIS, height - AXIS + 4);
      const text = `step ${step}`;
      const left = place(text, this.x(at));
      if (left < free) continue;
      pen.fillText(text, left, height - 5);
      free = left + pen.measureText(text).width + 10;
    }
    pen.strokeStyle = colour("alarm");
    for (const at of this.timeline.resumed) {
      if (at >= from && at <= to) line(this.x(at), AXIS - 4, height - AXIS);
    }
  }

  drawRow(pen, colour, row, top) {
    if (row.gaps) {
      pen.fillStyle = colour("pool");
      pen.fillRect(0, top, this.width, LANE);
    }
    const first = firstAfter(row.start, this.view.from - row.longest - 1);
    for (let i = first; i < row.start.length; i++) {
      if (row.start[i] > this.view.to) break;
      const left = this.x(row.start[i]);
      const width = Math.max(this.x(row.start[i] + row.length[i]) - left, 0.7);
      if (left + width < 0) continue;
      const wait = !row.gaps && this.isWait(row.name[i]);
      pen.fillStyle = row.gaps
        ? colour("gap")
        : wait
          ? colour("wait")
          : colour(`call${this.colours.get(this.method(row, row.name[i]))}`);
      const inset = wait ? 6 : 2;
      pen.fillRect(left, top + inset, width > 3 ? width - 0.5 : width, LANE - 2 * inset);
      this.write(pen, colour, row, i, left, width, top, wait);
    }
  }

  /** The name of a span in it, where there is room. */
  write(pen, colour, row, i, left, width, top, wait) {
    if (width < 46 || wait) return;
    const text = row.gaps ? `idle ${duration(row.length[i])}` : this.method(row, row.name[i]);
    const start = Math.max(left, 0);
    const room = Math.min(left + width, this.width) - start;
    if (pen.measureText(text).width > room - 6) return;
    const call = this.colours.get(this.method(row, row.name[i]));
    pen.fillStyle = colour(row.gaps ? "ink" : `on-call${call}`);
    pen.fillText(text, start + 4, top + 12.5);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = this.rows[Math.floor((event.clientY - box.top - AXIS) / LANE)];
    const time = this.timeAt(event);
    const slop = ((this.view.to - this.view.from) / this.width) * 2;
    this.readout.textContent = row ? this.tell(row, time, slop) : "";
  }

  /** The span of a row at a time, or within `slop` of it. */
  tell(row, time, slop) {
    let best = null;
    const first = firstAfter(row.start, time - row.longest - slop - 1);
    for (let i = first; i < row.start.length; i++) {
      if (row.start[i] > time + slop) break;
      const away = Math.max(row.start[i] - time, time - row.start[i] - row.length[i], 0);
      if (away <= slop && (best === null || away <= best.away)) best = { i, away };
    }
    if (best === null) return `${row.title} · ${duration(Math.round(time))}`;
    const { i } = best;
    const what = this.timeline.names[row.name[i]];
    const step = this.timeline.steps.find(([at]) => at >= row.start[i] + row.length[i]);
    const about = this.timeline.every_step ? "step" : "about step";
    const where = `at ${number(row.start[i] / 1e6)} s${step ? `, ${about} ${step[1]}` : ""}`;
    const kind = row.gaps ? "idle, " : "";
    return `${row.title} · ${kind}${what} · ${duration(row.length[i])} · ${where}`;
  }
}

function startTimeline() {
  const root = document.getElementById("timeline-view");
  return root ? new Timeline(root, data.timeline) : null;
}
