// The table of samples: filtered by step and text, sorted by a column, a page of rows at a time.

const PAGE = 50;
const COLUMNS = ["step", "prompt", "completion", "answer", "score", "reward", "agreement", "tokens"];
const TEXTS = ["prompt", "completion", "answer"];

class Samples {
  constructor(root, samples) {
    this.samples = samples;
    this.rows = PAGE;
    this.order = { column: "step", up: true };
    this.table = root.querySelector("tbody");
    this.count = root.querySelector(".count");
    this.more = root.querySelector("button[name='more']");
    this.heads = new Map(COLUMNS.map((name) => [name, root.querySelector(`th[data-column="${name}"]`)]));
    for (const [name, head] of this.heads) {
      head.querySelector("button")?.addEventListener("click", () => this.sortBy(name));
    }
    const steps = [...new Set(samples.map((sample) => sample.step))].sort((a, b) => a - b);
    control("sample-step").append(...steps.map((step) => element("option", { value: step }, `step ${step}`)));
    for (const name of ["sample-step", "sample-text"]) {
      control(name).addEventListener("input", () => {
        this.rows = PAGE;
        this.draw();
      });
    }
    this.more.addEventListener("click", () => {
      this.rows += PAGE;
      this.draw();
    });
    this.draw();
  }

  /** By a column; a second time the other way round. Numbers begin with the largest. */
  sortBy(column) {
    const again = this.order.column === column;
    this.order = { column, up: again ? !this.order.up : column === "step" };
    this.draw();
  }

  chosen() {
    const step = control("sample-step").value;
    const text = control("sample-text").value.toLowerCase();
    const { column, up } = this.order;
    const fits = (sample) =>
      (step === "" || sample.step === Number(step)) &&
      TEXTS.some((name) => (sample[name] ?? "").toLowerCase().includes(text));
    const value = (sample) => sample[column] ?? (up ? Infinity : -Infinity); // unknown ones last
    return this.samples.filter(fits).sort((a, b) => (up ? value(a) - value(b) : value(b) - value(a)) || 0);
  }

  draw() {
    const chosen = this.chosen();
    this.table.replaceChildren(...chosen.slice(0, this.rows).map((sample) => this.row(sample)));
    const drawn = Math.min(this.rows, chosen.length);
    this.count.textContent = `${drawn} of ${chosen.length} that fit, ${this.samples.length} in all`;
    this.more.hidden = chosen.length <= this.rows;
    for (const [name, head] of this.heads) {
      const sorted = name === this.order.column;
      head.setAttribute("aria-sort", sorted ? (this.order.up ? "ascending" : "descending") : "none");
    }
  }

  row(sample) {
    const cells = COLUMNS.map((name) =>
      TEXTS.includes(name)
        ? element("td", { class: `text ${name}` }, element("div", {}, sample[name] ?? "–"))
        : element("td", { class: "number" }, number(sample[name])),
    );
    if (sample.of_step) cells[COLUMNS.indexOf("agreement")].classList.add("muted");
    if (sample.finish_reason === "length") cells[COLUMNS.indexOf("tokens")].append(" cut");
    return element("tr", {}, ...cells);
  }
}

function startSamples() {
  const root = document.getElementById("samples-view");
  return root ? new Samples(root, data.samples) : null;
}
