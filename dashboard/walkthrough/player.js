// Playing and stepping. The server gets the step where the player stops, for the link; the player does not wait for it.

const SPEEDS = { "½×": 1400, "1×": 700, "2×": 350 };
const REPORT_DELAY_MS = 400;

function section(title, kind, ...children) {
  return html("section", { class: kind }, html("h3", {}, title), ...children);
}

class Walkthrough {
  constructor(root, data) {
    this.data = data;
    this.timer = null;
    this.fresh = data.start === 1;  // nothing has been chosen: Play begins with the first phase
    this.cards = html("ol", { class: "phases" });
    const views = data.timeline ? this.overTime() : this.ofTiles();
    this.node = html("div", { class: `walk ${data.palette.name}`, tabindex: 0 }, this.bar(), this.cards, ...views);
    for (const [name, colour] of Object.entries(data.palette)) {
      if (typeof colour === "string") this.node.style.setProperty(`--${name}`, colour);
    }
    this.node.style.setProperty("--second", data.palette.series[1]);
    this.node.addEventListener("keydown", (event) => this.pressed(event));
    root.append(this.node);
  }

  overTime() {
    this.figures = [timelineFigure(this.data)];
    return [section("Who does what, when", "", this.figures[0].node)];
  }

  ofTiles() {
    const { data } = this;
    this.figures = [orderFigure(data), (data.backward ? gradientFigure : tileFigure)(data), meterFigure(data), memoryFigure(data), errorFigure(data), heatFigure(data)];
    const [order, tile, meter, memory, error, heat] = this.figures.map((figure) => figure.node);
    const stage = html("div", { class: "stage" }, section("Loop order", "order", order, html("p", { class: "said" }, data.order)),
                       section("Inside the tile", "inside", tile));
    const below = html("div", { class: "below" }, section("Attention of all queries", data.decode ? "heat wide" : "heat", heat),
                       section("Bytes through device memory, without a cache", "", meter), section(data.against, "", error),
                       section("Contents of each memory", "memory", memory));
    return [stage, below];
  }

  bar() {
    const button = (name, text, act) => {
      const made = html("button", { type: "button", "aria-label": name, title: name }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.playButton = button("Play", "▶ Play", () => this.toggle());
    this.playButton.classList.add("play");
    this.slider = html("input", { type: "range", min: 1, max: this.data.steps.length, step: 1, "aria-label": "Step" });
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value) - 1));
    this.place = html("output", { class: "place" });
    const speeds = html("select", { "aria-label": "Speed" }, ...Object.keys(SPEEDS).map((name) => html("option", { value: name }, name)));
    speeds.value = "1×";
    this.pace = SPEEDS["1×"];
    speeds.addEventListener("change", () => { this.pace = SPEEDS[speeds.value]; });
    return html("div", { class: "bar" }, this.playButton, button("Back to the first step", "|◀", () => this.go(0)),
                button("Previous step", "◀", () => this.go(this.at - 1)), button("Next step", "▶", () => this.go(this.at + 1)),
                this.slider, this.place, speeds);
  }

  pressed(event) {
    const keys = { ArrowRight: () => this.go(this.at + 1), ArrowLeft: () => this.go(this.at - 1), " ": () => this.toggle() };
    if (event.composedPath()[0] !== this.node || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  }

  // Stop, and show a step, whole or up to one of its phases.
  go(at, phase = Infinity) {
    this.pause();
    this.fresh = false;
    this.show(at, phase);
    this.tell();
  }

  show(at, phase) {
    const steps = this.data.steps;
    this.at = Math.min(Math.max(at, 0), steps.length - 1);
    const step = steps[this.at];
    this.phase = Math.min(this.data.timeline ? Infinity : phase, step.phases.length - 1);
    this.figures.forEach((figure) => figure.update(this.at, this.phase));
    this.slider.value = this.at + 1;
    this.place.textContent = `step ${this.at + 1} of ${steps.length}`;
    this.cards.replaceChildren(...step.phases.map(([title, text], n) => {
      const state = this.data.timeline || n === this.phase ? "now" : n < this.phase ? "past" : "next";
      const card = html("li", { class: state }, html("button", { type: "button" }, this.data.timeline ? title : `${n + 1}. ${title}`), html("p", {}, text));
      card.addEventListener("click", () => this.go(this.at, n));
      return card;
    }));
  }

  toggle() {
    if (this.timer) {
      this.pause();
      this.tell();
      return;
    }
    const last = this.data.steps.length - 1;
    const anew = this.fresh || (this.at === last && this.phase === this.data.steps[last].phases.length - 1);
    this.fresh = false;
    if (anew) this.show(0, 0);
    this.playButton.textContent = "❚❚ Pause";
    this.playButton.setAttribute("aria-label", "Pause");
    this.timer = setTimeout(() => this.tick(), anew ? this.pace : 0);
  }

  tick() {
    if (!this.node.isConnected) return;
    const { steps } = this.data;
    if (this.phase < steps[this.at].phases.length - 1) this.show(this.at, this.phase + 1);
    else if (this.at < steps.length - 1) this.show(this.at + 1, 0);
    else {
      this.pause();
      this.tell();
      return;
    }
    this.timer = setTimeout(() => this.tick(), this.pace);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.playButton.textContent = "▶ Play";
    this.playButton.setAttribute("aria-label", "Play");
  }

  tell() {
    clearTimeout(this.telling);
    this.telling = setTimeout(() => this.report(this.at + 1), REPORT_DELAY_MS);
  }

  end() {
    clearTimeout(this.timer);
    clearTimeout(this.telling);
    this.node.remove();
  }
}

export default function (component) {
  const { data, parentElement, setStateValue } = component;
  const kept = parentElement.walkthrough;
  if (!kept || kept.data.case !== data.case || kept.data.palette.name !== data.palette.name) {
    const same = kept && kept.data.case === data.case;
    kept?.end();
    const made = new Walkthrough(parentElement, data);
    parentElement.walkthrough = made;
    if (same) made.show(kept.at, kept.phase);
    else made.show(data.start - 1, Infinity);
  }
  parentElement.walkthrough.report = (step) => setStateValue("step", step);
}
