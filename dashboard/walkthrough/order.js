// The score matrix in tiles: thread block and order of each tile, and the scores of the current tile.

function orderFigure(data) {
  const { palette, block, columns, rows, steps } = data;
  const side = 268, left = 42, top = 36, size = side / columns, high = data.decode ? 56 : size;
  const wide = steps.filter((step) => step.wide);  // not a tile: a bar below the grid
  const height = top + rows * high + (wide.length ? 42 * wide.length + 10 : 0) + 6;
  const figure = svg("svg", { viewBox: `0 0 ${left + side + 4} ${height}`, role: "img" }, patterns(palette));
  const label = (text, x, y, more = {}) => svg("text", { x, y, class: "label", ...more }, text);
  figure.append(label("keys →", left + side / 2, 11, { "text-anchor": "middle" }));
  const span = (at) => `${at * block}–${at * block + block - 1}`;
  for (let j = 0; j < columns; j++) {
    figure.append(label(span(j), left + (j + 0.5) * size, 28, { "text-anchor": "middle", class: "label small" }));
  }
  for (let i = 0; i < rows; i++) {
    const text = data.decode ? "1 token" : span(i);
    const at = { "text-anchor": "end", class: "label small" };
    figure.append(label(text, left - 6, top + (i + 0.5) * high + 4, at));
  }
  if (!data.decode) {
    const turned = `translate(9 ${top + (rows * high) / 2}) rotate(-90)`;
    figure.append(label("← queries", 0, 0, { "text-anchor": "middle", transform: turned }));
  }
  const colour = (step) => palette.series[step.threadBlock % palette.series.length];
  const tiles = steps.map((step) => {
    const x = left + Math.max(step.j, 0) * size, y = top + step.i * high;
    const box = step.wide
      ? { x: left, y: top + rows * high + 14 + 42 * wide.indexOf(step), width: side - 2, height: 34 }
      : { x, y, width: size - 2, height: high - 2 };
    const fill = step.skipped ? "url(#dots)" : step.wide ? palette.measured : colour(step);
    const back = svg("rect", { ...box, rx: 4, class: "tile", fill });
    const middle = { x: box.x + box.width / 2, y: box.y + box.height / 2 + 5, "text-anchor": "middle" };
    const said = step.wide ?? (step.skipped ? "" : String(step.number));
    const text = svg("text", { ...middle, class: "turn" }, said);
    figure.append(back, text);
    return { back, text, box };
  });
  figure.append(...chevrons(data, tiles));
  const heat = matrix(palette, 0, 0, block, block, (size - 8) / block, (high - 8) / block);
  const frame = svg("rect", { rx: 5, class: "frame" });
  figure.append(heat.group, frame);
  const shown = (step) => step.S ?? step.P;  // the backward does not keep S
  const limit = largest(steps.flatMap((step) => shown(step) ?? []));
  const node = html("div", {}, figure, legend(data, colour));

  function update(at, phase) {
    const step = steps[at], { box } = tiles[at];
    tiles.forEach(({ back, text }, n) => {
      const share = n < at ? 0.62 : n === at ? 0.9 : 0.2;
      back.style.opacity = steps[n].skipped ? (n <= at ? 1 : 0.55) : share;
      text.style.opacity = n === at && shown(step) ? 0 : 1;
    });
    heat.group.setAttribute("transform", `translate(${box.x + 3} ${box.y + 3})`);
    heat.group.style.display = shown(step) ? "" : "none";
    if (shown(step)) heat.fill(phase > 0 ? shown(step) : undefined, (x) => signed(palette, x, limit));
    const around = { x: box.x - 1, y: box.y - 1, width: box.width + 2, height: box.height + 2 };
    for (const [key, value] of Object.entries(around)) frame.setAttribute(key, value);
    const what = step.skipped ? "skipped" : step.wide ? step.wide : `step ${step.number} of its thread block`;
    figure.setAttribute("aria-label", `Score matrix of ${rows} by ${columns} tiles; current: ${what}. ${data.order}`);
  }
  return { node, update };
}

// Small arrows between consecutive tiles of a thread block.
function chevrons(data, tiles) {
  const made = [];
  data.steps.forEach((step, n) => {
    const next = data.steps[n + 1];
    if (!next || next.threadBlock !== step.threadBlock || step.skipped || next.skipped || step.wide || next.wide) return;
    const down = next.i === step.i + 1 && next.j === step.j, right = next.j === step.j + 1 && next.i === step.i;
    if (!down && !right) return;
    const { x, y, width, height } = tiles[n].box;
    const place = down ? `translate(${x + width / 2} ${y + height + 1}) rotate(90)`
                       : `translate(${x + width + 1} ${y + height / 2})`;
    const disc = svg("circle", { r: 6.5, fill: data.palette.background, stroke: data.palette.grid });
    made.push(svg("g", { transform: place }, disc, svg("path", { d: "M-1.5 -3L1.8 0L-1.5 3", class: "chevron" })));
  });
  return made;
}

function legend(data, colour) {
  const list = html("p", { class: "legend" });
  const seen = new Map(data.steps.filter((step) => !step.wide).map((step) => [step.threadBlock, step]));
  if (seen.size > 1) list.append(html("span", {}, "thread blocks:"));
  for (const [block, step] of seen) {
    const swatch = html("i", { style: `background:${colour(step)}` });
    list.append(html("span", {}, swatch, seen.size === 1 ? "one thread block" : String(block + 1)));
  }
  if (data.steps.some((step) => step.skipped)) list.append(html("span", {}, html("i", { class: "dots" }), "skipped"));
  return list;
}
