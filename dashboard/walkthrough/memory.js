// Bytes through device memory, contents of each memory, and the error against the plain softmax.

function meterFigure(data) {
  const { meters } = data, last = data.steps.length;
  const most = Math.max(...meters.map((meter) => meter.read[last] + meter.written[last]));
  const node = html("div", { class: "meters" });
  const rows = meters.map((meter, at) => {
    const read = html("b", { class: "read" }), written = html("b", { class: "written" });
    const all = (100 * (meter.read[last] + meter.written[last])) / most;
    const track = html("div", { class: "line" }, html("u", { style: `width:${all}%` }), read, written);
    const value = html("span", { class: "bytes" });
    node.append(html("div", { class: at ? "meter" : "meter own" }, html("span", {}, meter.name), value, track));
    return { read, written, value };
  });
  const key = [["read", "read"], ["written", "written"], ["total", "at the end"]];
  node.append(html("p", { class: "legend" }, ...key.map(([kind, text]) => html("span", {}, html("i", { class: kind }), text))));
  const said = html("p", { class: "said" });
  node.append(said);

  function update(at, phase) {
    const done = phase >= data.steps[at].phases.length - 1;
    meters.forEach((meter, n) => {
      const read = meter.read[at + 1], written = meter.written[done ? at + 1 : at];
      rows[n].read.style.width = `${(100 * read) / most}%`;
      rows[n].written.style.width = `${(100 * written) / most}%`;
      rows[n].value.textContent = bytes(read + written);
    });
    said.textContent = data.steps[at].meterText;
  }
  return { node, update };
}

function memoryFigure(data) {
  const node = html("div", { class: "shelves" });
  const chips = data.held.map(({ level, items, said }) => {
    const made = items.map(([name, size]) => html("span", { class: "chip" }, html("b", {}, name), ` ${bytes(size)}`));
    node.append(html("div", { class: "shelf" }, html("div", { class: "level" }, level, html("small", {}, said)), html("div", {}, ...made)));
    return made;
  });

  function update(at, phase) {
    const step = data.steps[at], done = phase >= step.phases.length - 1;
    const uses = (when) => typeof when === "number" ? Boolean(step.P) && phase >= when : phase === 0 && when in step.reads;
    data.held.forEach(({ items }, level) => items.forEach(([, , arrays, when], n) => {
      const reads = arrays.some((name) => name in step.reads) && phase === 0;
      const writes = arrays.some((name) => name in step.writes) && done;
      const chip = chips[level][n];
      chip.classList.toggle("out", reads);
      chip.classList.toggle("in", writes);
      chip.classList.toggle("busy", when !== null && uses(when));
    }));
  }
  return { node, update };
}

function errorFigure(data) {
  const { palette, steps } = data, width = 330, height = 150, left = 40, bottom = 24, top = 8;
  const x = (n) => left + ((n + 1) / steps.length) * (width - left - 8);
  const y = (value) => top + ((1 - Math.log10(Math.max(value, 1e-8))) / 9) * (height - top - bottom);
  const figure = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const [value, text] of [[1, "1"], [1e-3, "10⁻³"], [1e-6, "10⁻⁶"]]) {
    figure.append(svg("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value), class: "rule" }));
    figure.append(svg("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end", class: "label small" }, text));
  }
  figure.append(svg("text", { x: width - 8, y: height - 5, "text-anchor": "end", class: "label small" }, "steps →"));
  const cursor = svg("line", { y1: top, y2: height - bottom, class: "cursor" });
  figure.append(cursor);
  const groups = new Map();
  steps.forEach((step, n) => {
    const name = step.line;
    if (!step.error) return;
    if (!groups.has(name)) groups.set(name, []);
    if (!step.skipped) groups.get(name).push([n, Math.max(...step.error)]);
  });
  const lines = [...groups].map(([name, points], at) => {
    const colour = name === "merge" ? palette.measured : palette.series[at % palette.series.length];
    const line = svg("path", { class: "curve", stroke: colour });
    const dots = points.map(([n, value]) => svg("circle", { cx: x(n), cy: y(value), r: 3.2, fill: colour }));
    figure.append(line, ...dots);
    return { name, points, line, dots };
  });
  const said = html("p", { class: "said" });

  function update(at, phase) {
    const step = steps[at], shown = phase >= step.phases.length - 1 ? at : at - 1;
    lines.forEach(({ points, line, dots }) => {
      const seen = points.filter(([n]) => n <= shown);
      line.setAttribute("d", seen.map(([n, value], k) => `${k ? "L" : "M"}${x(n)} ${y(value)}`).join(""));
      dots.forEach((dot, k) => { dot.style.display = points[k][0] <= shown ? "" : "none"; });
    });
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    said.textContent = step.errorText;
    figure.setAttribute("aria-label", `Largest error of each block of rows, on a logarithmic scale. ${step.errorText}`);
  }
  return { node: html("div", {}, figure, said), update };
}
