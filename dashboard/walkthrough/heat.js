// P of the plain softmax over all keys, with the borders of tiles; the current tile is framed.

function heatFigure(data) {
  const { palette, block, attention, steps } = data;
  const rows = attention.length, columns = attention[0].length, size = columns > 32 ? 7 : 10, left = 22, top = 18;
  const width = columns * size, height = rows * size, tile = block * size;
  const figure = svg("svg", { viewBox: `0 0 ${left + width + 2} ${top + height + 2}`, role: "img" }, patterns(palette));
  figure.append(svg("text", { x: left + width / 2, y: 11, "text-anchor": "middle", class: "label small" }, "keys →"));
  const across = { transform: `translate(12 ${top + height / 2}) rotate(-90)`, "text-anchor": "middle", class: "label small" };
  figure.append(svg("text", across, data.decode ? "heads" : "← queries"));
  const cells = matrix(palette, left, top, rows, columns, size, size);
  cells.fill(attention, (x) => positive(palette, x, 1));
  const edge = (x1, y1, x2, y2) => svg("line", { x1, y1, x2, y2, class: "border" });
  figure.append(cells.group);
  for (let x = 0; x <= width; x += tile) figure.append(edge(left + x - 0.5, top, left + x - 0.5, top + height));
  for (let y = 0; y <= height; y += tile) figure.append(edge(left, top + y - 0.5, left + width, top + y - 0.5));
  const frame = svg("rect", { width: tile, height: tile, class: "frame" });
  figure.append(frame);
  const said = html("p", { class: "said" }, "The weight of each key for each query: pale is 0, deep is 1, hatched is hidden. A row adds up to 1. " +
    "A thread block never holds more of this matrix than one tile.");

  function update(at) {
    const { i, j, wide } = steps[at];
    frame.style.display = wide ? "none" : "";
    frame.setAttribute("x", left + Math.max(j, 0) * tile - 0.5);
    frame.setAttribute("y", top + (data.decode ? 0 : Math.max(i, 0) * tile) - 0.5);
    const where = wide ? wide : `current tile: rows from ${i * block}, keys from ${j * block}`;
    figure.setAttribute("aria-label", `Attention weights of ${rows} rows and ${columns} keys, in tiles of ${block}; ${where}.`);
  }
  return { node: html("div", {}, figure, said), update };
}
