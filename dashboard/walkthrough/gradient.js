// Inside one step of the backward: P recomputed, the backward of softmax, and the three gradients.

function gradientFigure(data) {
  const { palette, block, steps } = data;
  const wide = block * CELL, second = wide + 12, third = 2 * second, fourth = 3 * second - 4;
  const { views, caption, grid, values, rule } = panels(data, [fourth - 56, fourth + 40, fourth - 8], [0, 0, TOP - 24]);
  const low = TOP - 9;
  const Q = grid(0, 0, TOP, ROW), P = grid(0, second, TOP, ROW), K = grid(0, second, HEAD, UPPER);
  const dO = grid(1, 0, TOP, ROW), dP = grid(1, second, TOP, ROW), V = grid(1, second, HEAD, UPPER);
  const dS = grid(1, third, TOP, ROW), L = values(0, third - 2, 50), D = values(1, fourth, 40);
  const dQ = grid(2, 0, TOP, ROW), dK = grid(2, second, TOP, ROW), dV = grid(2, third, TOP, ROW);
  caption(0, 0, low, "Q", "shared memory");
  caption(0, second, HEAD - 7, "Kᵀ", "shared memory");
  caption(0, second, low, "P", "registers");
  caption(0, third - 2, low, "L");
  caption(1, 0, low, "dO", "shared memory");
  caption(1, second, HEAD - 7, "Vᵀ", "shared memory");
  caption(1, second, low, "dP", "registers");
  caption(1, third, low, "dS", "registers");
  caption(1, fourth, low, "D");
  caption(2, 0, low, "dQ", "device mem.");
  caption(2, second, low, "dK", "registers");
  caption(2, third, low, "dV", "registers");
  const rules = [
    [0, 0, "S = Q Kᵀ"], [0, 0, "P = exp(S − L)"], [1, 0, "dP = dO Vᵀ"], [1, third, "dS = P ∘ (dP − D)"],
  ];
  rules.forEach(([view, x, text], n) => rule(view, x, n % 2, text));
  const sums = ["dQ′ = dQ + scale · dS K", "dK′ = dK + scale · dSᵀ Q", "dV′ = dV + Pᵀ dO"];

  const limits = Object.fromEntries(["Q", "K", "V", "dO"].map((name) => [name, largest(data[name])]));
  for (const name of ["dP", "dS"]) limits[name] = largest(steps.map((step) => step[name] ?? 0));
  ["dQ", "dK", "dV"].forEach((name, n) => { limits[name] = largest(steps.map((step) => step.gradients[1][n])); });
  const rowsOf = (all, at) => all.slice(at * block, (at + 1) * block);
  const colourOf = (name) => (x) => signed(palette, x, limits[name]);

  function update(at, phase) {
    const step = steps[at];
    triple.hidden = Boolean(step.wide);
    tables.node.hidden = !triple.hidden;
    if (step.wide) tables.update(step, phase);
    else showTile(step, phase);
  }

  function showTile(step, phase) {
    const has = Boolean(step.P), done = phase >= step.phases.length - 1;
    views.forEach((view) => view.classList.toggle("away", step.skipped));
    const turned = (rows) => rows[0].map((_, d) => rows.map((row) => row[d]));
    Q.fill(rowsOf(data.Q, step.i), colourOf("Q"));
    dO.fill(rowsOf(data.dO, step.i), colourOf("dO"));
    K.fill(turned(rowsOf(data.K, step.j)), colourOf("K"));
    V.fill(turned(rowsOf(data.V, step.j)), colourOf("V"));
    L.fill(rowsOf(data.L, step.i).map(number));
    D.fill(rowsOf(data.D, step.i).map(number));
    P.fill(has && phase > 0 ? step.P : undefined, (x) => positive(palette, x, 1));
    dP.fill(has && phase > 1 ? step.dP : undefined, colourOf("dP"));
    dS.fill(has && phase > 1 ? step.dS : undefined, colourOf("dS"));
    [["dQ", dQ], ["dK", dK], ["dV", dV]].forEach(([name, cells], n) =>
      cells.fill(step.gradients[done ? 1 : 0][n], colourOf(name)));
    views[0].setAttribute("aria-label", `Q, K, probabilities and log-sum-exp of each row. ${step.phases.map((x) => x[1]).join(" ")}`);
    views[1].setAttribute("aria-label", "dO, V, dP, dS, and D of each row.");
    views[2].setAttribute("aria-label", `The gradients dQ, dK and dV so far. ${step.errorText}`);
  }
  const added = html("div", { class: "sums" }, views[2], html("div", {}, ...sums.map((text) => html("p", {}, text))));
  const triple = html("div", {}, html("div", { class: "pair uneven" }, views[0], views[1]), added), tables = tablesFigure(data);
  return { node: html("div", {}, triple, tables.node), update };
}
