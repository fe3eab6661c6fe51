// The table of samples: filtered by step and text, sorted by a column, a page of rows at a time.

const PAGE = 50;
const TEXTS = ["prompt", "completion", "answer"];

function turns(sample) {
  return sample.turns ?? [];
}

/** One turn of a completion: who speaks, what, and what that was worth. */
function turnView(turn) {
  const worth = ["reward", "advantage"].filter((name) => (turn[name] ?? null) !== null);
  const said = worth.map((name) => `${name} ${number(turn[name])}`).join(", ");
  return element(
    "span",
    { class: `turn${turn.learned ? " learned" : ""}` },
    element("b", {}, turn.role),
    element("small", {}, said),
    element("span", { class: "said" }, turn.content),
  );
}

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
      [...TEXTS.map((name) => sample[name]), ...turns(sample).map((turn) => turn.content)].some(
        (words) => (words ?? "").toLowerCase().includes(text),
      );
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
        const own = name === "completion";
        const parts = own && turns(sample).length ? turns(sample).map(turnView) : [];
        const learned = own && !parts.length && sample.learned > 0 ? { class: "learned" } : {};
        const text = element("div", learned, ...(parts.length ? parts : [sample[name] ?? "–"]));
        const none = own && sample.learned === 0 ? [element("small", {}, "not learned")] : [];
        return element("td", { class: `text ${name}`, "data-heading": name }, text, ...none);
      }
      const ofStep = name === "agreement" && sample.of_step ? " muted" : "";
      const cut = name === "tokens" && sample.finish_reason === "length" ? " cut" : "";
      const kind = { class: `number${ofStep}`, "data-heading": name };
      const rewards = Object.entries(name === "reward" ? (sample.rewards ?? {}) : {});
      const each = rewards.length > 1 ? rewards : [];
      const parts = each.map(([of, value]) => element("small", {}, `${of} ${number(value)}`));
      return element("td", kind, number(sample[name]) + cut, ...parts);
    };
    const cells = this.heads.map((head) => cell(head.dataset.column));
    return element("tr", {}, ...cells);
  }
}

function startSamples() {
  const root = document.getElementById("samples-view");
  return root ? new Samples(root, data.samples) : null;
}
