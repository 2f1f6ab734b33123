// Elements, numbers and colours of all figures of the walkthrough.

function element(space, name, attributes, children) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const svg = (name, attributes = {}, ...children) =>
  element("http://www.w3.org/2000/svg", name, attributes, children);
const html = (name, attributes = {}, ...children) => element(null, name, attributes, children);

const number = (x) => (x === null ? "−∞" : x.toFixed(2).replace("-", "−"));
const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
// Down to float32's rounding: 0.52, and 3·10⁻⁷.
function small(x) {
  if (x >= 0.005 || x === 0) return x.toFixed(2);
  const [digits, power] = x.toExponential(0).split("e-");
  return `${digits}·10⁻${[...power].map((digit) => SUPERSCRIPTS[digit]).join("")}`;
}
const bytes = (x) => `${x.toLocaleString("en-US")} B`;
const largest = (values) => Math.max(1e-9, ...values.flat(3).map((x) => Math.abs(x ?? 0)));

function mix(from, to, share) {
  const part = (hex, at) => parseInt(hex.slice(1 + 2 * at, 3 + 2 * at), 16);
  const blended = [0, 1, 2].map((at) => Math.round(part(from, at) + (part(to, at) - part(from, at)) * share));
  return `rgb(${blended.join(",")})`;
}
// Numbers of either sign: blue above zero, orange below, pale around it.
const signed = (palette, x, limit) =>
  mix(palette.idle, palette.series[x < 0 ? 1 : 0], Math.min(1, Math.abs(x) / limit) ** 0.7);
// Numbers from 0: a deeper colour is more.
const positive = (palette, x, limit) => mix(palette.idle, palette.accent, Math.min(1, x / limit) ** 0.7);

// A pattern of dots (skipped) or of lines (hidden by the mask), to be filled with url(#name).
function patterns(palette) {
  const dots = svg("pattern", { id: "dots", width: 9, height: 9, patternUnits: "userSpaceOnUse" });
  dots.append(svg("rect", { width: 9, height: 9, fill: palette.panel }));
  dots.append(svg("circle", { cx: 3, cy: 3, r: 1.1, fill: palette.muted, opacity: 0.6 }));
  const lines = svg("pattern", { id: "lines", width: 5, height: 5, patternUnits: "userSpaceOnUse" });
  lines.append(svg("rect", { width: 5, height: 5, fill: palette.panel }));
  lines.append(svg("path", { d: "M0 5L5 0", stroke: palette.muted, "stroke-width": 0.8, opacity: 0.7 }));
  return svg("defs", {}, dots, lines);
}

// Rectangles of a matrix; fill(values, colour) shows one, fill(null) empties it. Null values are hidden scores.
function matrix(palette, x, y, rows, columns, width, height) {
  const group = svg("g", { transform: `translate(${x} ${y})` });
  const cells = [];
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const place = { x: column * width, y: row * height, width: width - 1, height: height - 1, rx: 1.5 };
      const cell = svg("rect", { ...place, class: "cell" }, svg("title"));
      cells.push(cell);
      group.append(cell);
    }
  }
  const fill = (values, colour) => {
    cells.forEach((cell, at) => {
      const value = values ? values[Math.floor(at / columns)][at % columns] : undefined;
      cell.classList.toggle("empty", value === undefined);
      cell.style.fill = value === undefined ? "transparent" : value === null ? "url(#lines)" : colour(value);
      cell.firstChild.textContent = value === undefined ? "" : value === null ? "hidden" : number(value);
    });
  };
  return { group, fill };
}
