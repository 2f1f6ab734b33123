// FA3: bars of copies, ring stages, products and softmaxes over time, and a cursor at the current unit.

function timelineFigure(data) {
  const { palette, steps, timeline: { rows, bars } } = data;
  const left = 160, unit = 34, high = 26, top = 6, width = left + unit * steps.length + 4, bottom = top + high * rows.length;
  const figure = svg("svg", { viewBox: `0 0 ${width} ${bottom + 20}`, role: "img" });
  rows.forEach((name, row) => {
    const y = top + high * row;
    figure.append(svg("text", { x: left - 8, y: y + 17, "text-anchor": "end", class: "label" }, name));
    figure.append(svg("line", { x1: left, x2: width - 4, y1: y + high - 1, y2: y + high - 1, class: "rule" }));
  });
  const now = svg("rect", { y: top - 3, width: unit, height: bottom - top + 3, rx: 3, class: "now-unit" });
  figure.append(now);
  const made = bars.map(([row, text, tile, start, end]) => {
    const colour = tile < 0 ? palette.muted : palette.series[tile % palette.series.length];
    const place = { x: left + unit * start + 1, y: top + high * row + 3, width: unit * (end - start) - 2, height: high - 7, rx: 3 };
    const bar = svg("rect", { ...place, fill: colour, class: "tile" });
    const at = { x: place.x + place.width / 2, y: place.y + 14, "text-anchor": "middle", class: "bar-text" };
    figure.append(bar, svg("text", at, text));
    return { bar, start, end };
  });
  figure.append(svg("text", { x: width - 4, y: bottom + 14, "text-anchor": "end", class: "label small" }, "time, in assumed units →"));

  function update(at) {
    now.setAttribute("x", left + unit * at);
    made.forEach(({ bar, start, end }) => { bar.style.opacity = end <= at ? 0.35 : start <= at ? 0.7 : 0.14; });
    figure.setAttribute("aria-label", steps[at].phases.map(([who, text]) => `${who}: ${text}`).join(" "));
  }
  return { node: html("div", { class: "timeline" }, figure), update };
}
