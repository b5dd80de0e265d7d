// Draws charts and trees as SVG.

const SPACE = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, text = null) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** Bars and a curve over the same places, the newest 120 of them. */
export function chart(svg, bars, curve, label) {
  const [width, height, count] = [300, 64, Math.max(bars.length, curve.length)];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const first = Math.max(0, count - 120);
  const shown = [...bars.slice(first), ...curve.slice(first)].filter((value) => value !== null);
  const most = Math.max(1e-9, ...shown);
  const step = width / Math.max(1, count - first);
  const y = (value) => height - 2 - (value / most) * (height - 16);
  const parts = [make("line", { class: "axis", x1: 0, x2: width, y1: height - 1, y2: height - 1 })];
  bars.slice(first).forEach((value, i) => {
    parts.push(make("rect", {
      class: "bar", x: i * step, width: Math.max(1, step - 1), y: y(value), height: Math.max(0, height - 2 - y(value)),
    }));
  });
  const points = curve.slice(first).map((value, i) => (value === null ? null : `${(i + 0.5) * step},${y(value)}`));
  parts.push(make("polyline", { class: "curve", points: points.filter(Boolean).join(" ") }));
  svg.replaceChildren(...parts);
  svg.setAttribute("aria-label", label);
}

/** The draft tree of a cycle, its root on the left, and the token that was drawn behind the accepted path. */
export function tree(svg, cycle) {
  const [column, row, box] = [86, 30, 76];
  const nodes = [...cycle.nodes.map((node, i) => ({ ...node, index: i })), drawnNode(cycle)];
  const rows = places(nodes);
  const deepest = Math.max(...nodes.map((node) => node.depth));
  const leaves = Math.max(...rows) + 1;
  svg.setAttribute("viewBox", `0 0 ${deepest * column + 24} ${leaves * row + 8}`);
  svg.style.maxWidth = `${1.5 * (deepest * column + 24)}px`; // a tree of one node is no poster
  const at = (node, i) => [20 + (node.depth - 1) * column, 6 + rows[i] * row];
  const edges = nodes.map((node, i) => {
    const [x, y] = at(node, i);
    const parent = node.parent < 0 ? null : nodes[node.parent];
    const [fromX, fromY] = parent ? at(parent, node.parent) : [6 - box, 6 + rows[0] * row];
    const middle = fromX + box + (x - fromX - box) / 2;
    const start = `M${fromX + box} ${fromY + 11}`;
    return make("path", {
      class: `edge ${node.verdict === "accepted" || node.verdict === "drawn" ? "accepted" : ""}`,
      d: `${start} C${middle} ${fromY + 11} ${middle} ${y + 11} ${x} ${y + 11}`,
    });
  });
  const boxes = nodes.map((node, i) => {
    const [x, y] = at(node, i);
    const group = make("g", { class: node.verdict, transform: `translate(${x} ${y})` });
    group.append(
      make("title", {}, `${node.verdict}: ${JSON.stringify(node.token)}, p ${chance(node.p)}, q ${chance(node.q)}`),
      make("rect", { width: box, height: 22, rx: 5 }),
      make("text", { x: 6, y: 15 }, short(node.token)),
      make("text", { x: box - 4, y: 15, "text-anchor": "end" }, node.p === null ? "" : node.p.toFixed(2)),
    );
    return group;
  });
  svg.replaceChildren(...edges, ...boxes);
  svg.setAttribute("aria-label", `A tree of ${cycle.nodes.length} guesses, of which ${cycle.accepted} were accepted`);
}

function drawnNode(cycle) {
  const path = cycle.nodes.map((node, i) => ({ ...node, i })).filter((node) => node.verdict === "accepted");
  const parent = path.length ? path[path.length - 1] : null;
  return { ...cycle.drawn, parent: parent ? parent.i : -1, depth: parent ? parent.depth + 1 : 1, q: null, verdict: "drawn" };
}

/** A row for every node: leaves one below the other, a parent beside its first child. */
function places(nodes) {
  const rows = nodes.map(() => 0);
  let next = 0;
  const visit = (parent) => {
    let mine = null;
    nodes.forEach((node, i) => {
      if (node.parent !== parent) return;
      const below = node.verdict === "drawn" ? null : visit(i);
      rows[i] = below ?? next++;
      mine ??= rows[i];
    });
    return mine;
  };
  visit(-1);
  return rows;
}

function short(token) {
  const shown = token.replaceAll("\n", "⏎").replaceAll(" ", "·");
  return shown.length > 5 ? `${shown.slice(0, 4)}…` : shown;
}

export function chance(p) {
  return p === null || p === undefined ? "–" : p.toPrecision(3);
}
