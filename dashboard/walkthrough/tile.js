// Inside one step: Q, K and V, scores, maxima and factors of each row, probabilities, sums, and the rescaled O.

const CELL = 11.5, ROW = 25, UPPER = 15, HEAD = 20, TOP = HEAD + 8 * UPPER + 30, WIDTH = 340;

// A column of one number per row as text; with `bar`, also a bar whose length is a share of 1.
function column(palette, x, rows, width, bar) {
  const group = svg("g", { transform: `translate(${x} ${TOP})` });
  const made = Array.from({ length: rows }, (_, row) => {
    const place = { y: row * ROW + 7, height: 10, rx: 2 };
    const track = svg("rect", { ...place, width, class: "track" }), line = svg("rect", { ...place, class: "bar" });
    const text = svg("text", { x: bar ? width + 5 : 0, y: row * ROW + 16, class: "value" });
    group.append(...(bar ? [track, line] : []), text);
    return { line, text };
  });
  const fill = (texts, shares, marked) => {
    made.forEach(({ line, text }, row) => {
      text.textContent = texts ? texts[row] : "";
      for (const made of [line, text]) made.classList.toggle("marked", Boolean(marked && marked[row]));
      if (bar) line.setAttribute("width", texts ? Math.max(0, shares[row]) * width : 0);
    });
  };
  return { group, fill };
}

// Empty figures of these widths, which begin at the heights `tops`, and functions that add captions, matrices and text.
function panels(data, widths, tops = widths.map(() => 0)) {
  const { palette, block } = data, bottom = TOP + 8 * ROW + 4;
  const views = widths.map((width, n) =>
    svg("svg", { viewBox: `0 ${tops[n]} ${width} ${bottom - tops[n]}`, role: "img" }, patterns(palette)));
  const caption = (view, x, y, text, where) => {
    const made = svg("text", { x, y, class: "caption" }, text);
    if (where) made.append(svg("tspan", { class: "where", dx: 5 }, where));
    views[view].append(made);
    return made;
  };
  const grid = (view, x, y, height, width = CELL) => {
    const made = matrix(palette, x, y, block, block, width, height);
    views[view].append(made.group);
    return made;
  };
  const values = (view, x, width, bar) => {
    const made = column(palette, x, block, width, bar);
    views[view].append(made.group);
    return made;
  };
  const rule = (view, x, line, text) =>
    views[view].append(svg("text", { x, y: HEAD + 48 + 22 * line, class: "rule-text" }, text));
  return { views, caption, grid, values, rule };
}

function tileFigure(data) {
  const { palette, block, steps } = data;
  const { views, caption, grid, values, rule } = panels(data, [WIDTH, WIDTH]);
  const low = TOP - 9, wide = block * CELL, second = wide + 12, third = wide + 90;
  const Q = grid(0, 0, TOP, ROW), S = grid(0, second, TOP, ROW), K = grid(0, second, HEAD, UPPER);
  const m = values(0, second + wide + 10, 72), alpha = values(0, second + wide + 84, 28, true);
  const P = grid(1, 0, TOP, ROW), l = values(1, wide + 10, 72);
  const O = grid(1, third, TOP, ROW), V = grid(1, third, HEAD, UPPER), error = values(1, third + wide + 10, 60);
  const right = second + wide + 10;
  caption(0, 0, low, "Q", "shared memory");
  caption(0, second, HEAD - 7, "Kᵀ", "shared memory");
  caption(0, second, low, "S = Q Kᵀ", "registers");
  caption(0, right, low, "m → m′");
  caption(0, second + wide + 84, low, "α");
  caption(1, 0, low, "P", "registers");
  caption(1, wide + 10, low, "l → l′");
  caption(1, third, HEAD - 7, "V", "shared memory");
  const captionO = caption(1, third, low, "O");
  caption(1, third + wide + 10, low, "error");
  const rules = [
    [0, right, "m′ = max(m, row of S)"], [0, right, "α = exp(m − m′)"], [1, 0, "P = exp(S − m′)"],
    [1, 0, "l′ = α l + row sum of P"], [1, 0, data.fa1 ? "O′ = (α l O + P V) / l′" : "O′ = α O + P V"],
  ];
  rules.forEach(([view, x, text], n) => rule(view, x, view ? n - 2 : n, text));
  const frames = svg("g", { transform: `translate(${third} ${TOP})` });
  const risen = Array.from({ length: block }, (_, row) =>
    svg("rect", { x: -2.5, y: row * ROW - 0.5, width: wide + 4, height: ROW, rx: 3, class: "rescaled" }));
  frames.append(...risen);
  views[1].append(frames);

  const limits = Object.fromEntries(["Q", "K", "V"].map((name) => [name, largest(data[name])]));
  limits.S = largest(steps.flatMap((step) => step.S ?? []));
  limits.O = largest(steps.map((step) => step.O));
  const rowsOf = (all, at) => all.slice(at * block, (at + 1) * block);
  const arrow = (pair, shown) => pair[0].map((x, row) =>
    !shown ? number(x) : pair[0][row] === pair[1][row] ? number(x) : `${number(x)} → ${number(pair[1][row])}`);
  const colourOf = (limit) => (x) => signed(palette, x, limit);

  function update(at, phase) {
    pair.hidden = Boolean(steps[at].wide);
    tables.node.hidden = !pair.hidden;
    if (steps[at].wide) tables.update(steps[at], phase);
    else showTile(at, phase);
  }

  function showTile(at, phase) {
    const step = steps[at], done = phase >= step.phases.length - 1;
    const has = Boolean(step.S), scored = has && phase > 0, rescaled = has && phase > 1;
    views.forEach((view) => view.classList.toggle("away", step.skipped));
    captionO.firstChild.textContent =
      phase === 2 && has ? "O rescaled" : data.fa1 ? "O" : done && step.divided ? "O / l" : "O, not yet / l";
    const scales = (row) => has && phase === 2 && step.alpha[row] < 1 && step.m[0][row] !== null;
    risen.forEach((frame, row) => frame.classList.toggle("on", scales(row)));
    const before = steps.slice(0, at).reverse().find((x) => x.i === step.i && x.threadBlock === step.threadBlock);
    const off = done ? step.error : before?.error;
    error.fill(off?.map(small), null, off?.map((x) => x < 1e-4));
    Q.fill(rowsOf(data.Q, step.i), colourOf(limits.Q));
    const K_rows = rowsOf(data.K, step.j);
    K.fill(K_rows[0].map((_, d) => K_rows.map((row) => row[d])), colourOf(limits.K));
    V.fill(rowsOf(data.V, step.j), colourOf(limits.V));
    S.fill(scored ? step.S : undefined, colourOf(limits.S));
    const grown = has && step.m[0].map((x, row) => x !== step.m[1][row]);
    m.fill(has ? arrow(step.m, rescaled) : undefined, null, rescaled && grown);
    const factors = rescaled && step.alpha.map((x, row) => (step.m[0][row] !== null ? number(x) : grown[row] ? "first" : ""));
    alpha.fill(factors || undefined, step.alpha, rescaled && grown);
    P.fill(has && done ? step.P : undefined, (x) => positive(palette, x, 1));
    l.fill(has ? arrow(step.l, done) : undefined);
    O.fill(step.O[!has ? 2 : done ? 2 : rescaled ? 1 : 0], colourOf(limits.O));
    views[0].setAttribute("aria-label", `Q, K, scores, running maximum and alpha of each row. ${step.phases.map((x) => x[1]).join(" ")}`);
    views[1].setAttribute("aria-label", `Probabilities, running sum, V, O and error of each row. ${step.errorText}`);
  }
  const pair = html("div", { class: "pair" }, ...views), tables = tablesFigure(data);
  return { node: html("div", {}, pair, tables.node), update };
}

// A step without a tile (a merge of splits, a launch over all rows): blocks of rows, and a number beside each row.
function tablesFigure(data) {
  const { palette, block } = data, node = html("div", { class: "parts" });
  const wide = block * 9, texts = { share: (x) => `${(100 * x).toFixed(1)}%`, error: small, number };

  function update(step, phase) {
    const limit = largest(step.tables.map(({ rows }) => rows));
    node.replaceChildren(...step.tables.map(({ name, rows, beside, kind, from }) => {
      const view = svg("svg", { viewBox: `0 0 ${wide + 42} ${block * 18 + 24}` }, patterns(palette));
      const cells = matrix(palette, 0, 20, block, block, 9, 18);
      view.append(svg("text", { y: 12, class: "caption" }, name), cells.group);
      cells.fill(phase >= from[0] ? rows : undefined, (x) => signed(palette, x, limit));
      if (phase >= from[1]) {
        view.append(...beside.map((x, row) =>
          svg("text", { x: wide + 5, y: 20 + row * 18 + 13, class: "value" }, texts[kind](x))));
      }
      return view;
    }));
  }
  return { node, update };
}
