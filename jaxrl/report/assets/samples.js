// The table of samples: filtered by step and text, sorted by a column, a page of rows at a time.

const PAGE = 50;
const TEXTS = ["prompt", "completion", "answer"];

class Samples {
  constructor(root, samples) {
    this.samples = samples;
    this.rows = PAGE;
    this.order = { column: "step", up: true };
    this.table = root.querySelector("tbody");
    this.count = root.querySelector(".count");
    this.more = root.querySelector("button[name='more']");
    this.heads = [...root.querySelectorAll("th[data-column]")];
    for (const head of this.heads) {
      const sort = () => this.sortBy(head.dataset.column);
      head.querySelector("button")?.addEventListener("click", sort);
    }
    const steps = [...new Set(samples.map((sample) => sample.step))].sort((a, b) => a - b);
    const options = steps.map((step) => element("option", { value: step }, `step ${step}`));
    control("sample-step").append(...options);
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
    const order = (a, b) => value(a) - value(b) || 0; // two unknown ones are equal
    return this.samples.filter(fits).sort((a, b) => (up ? order(a, b) : order(b, a)));
  }

  draw() {
    const chosen = this.chosen();
    this.table.replaceChildren(...chosen.slice(0, this.rows).map((sample) => this.row(sample)));
    const drawn = Math.min(this.rows, chosen.length);
    this.count.textContent = `${drawn} of ${chosen.length} that fit, ${this.samples.length} in all`;
    this.more.hidden = chosen.length <= this.rows;
    const direction = this.order.up ? "ascending" : "descending";
    for (const head of this.heads) {
      const sorted = head.dataset.column === this.order.column;
      head.setAttribute("aria-sort", sorted ? direction : "none");
    }
  }

  row(sample) {
    const cell = (name) => {
      if (TEXTS.includes(name)) {
        const text = element("div", {}, sample[name] ?? "–");
        return element("td", { class: `text ${name}`, "data-heading": name }, text);
      }
      const ofStep = name === "agreement" && sample.of_step ? " muted" : "";
      const cut = name === "tokens" && sample.finish_reason === "length" ? " cut" : "";
      const kind = { class: `number${ofStep}`, "data-heading": name };
      return element("td", kind, number(sample[name]) + cut);
    };
    const cells = this.heads.map((head) => cell(head.dataset.column));
    return element("tr", {}, ...cells);
  }
}

function startSamples() {
  const root = document.getElementById("samples-view");
  return root ? new Samples(root, data.samples) : null;
}
