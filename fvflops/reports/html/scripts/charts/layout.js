// Where each cell of the plot of the module tree is.

const LEVELS = 16;
const MIN_WIDTH = 2; // px; narrower cells are merged with their neighbours
const MIN_REST = 0.4; // px; narrower merged cells are left out
const ROW_HEIGHT = 30; // px
const LETTER = 7; // px; the width of a letter
const LONGEST = 16; // letters of a rotated name
const ROTATED_WIDTH = 15; // px; the least width of a cell with a rotated name
const FEWEST_ROTATED = 3; // cells for which a row is made higher

/**
 * Return the cells of a node and all below it, which together are 1 wide: {kind, node, depth, x, w, count}.
 *
 * A "module" is a node; "own" is its value without its submodules, and "rest" are `count` modules too narrow to draw, of
 * which `node` is the first. `width` is the plot's in pixels.
 */
export function layOut(nodes, zoomed, { own, total }, width) {
  const cells = [];
  const stack = [{ kind: "module", node: zoomed, depth: 0, x: 0, w: 1 }];
  while (stack.length) {
    const cell = stack.pop();
    cells.push(cell);
    const value = cell.node.sum(total);
    if (cell.depth + 1 >= LEVELS || !value) continue;
    for (const inside of divide(nodes.children(cell.node, cell.node === zoomed), cell, value, { own, total }, width)) {
      if (inside.kind === "module") stack.push(inside);
      else cells.push(inside);
    }
  }
  return cells;
}

/** Return the cells of a node's children, with narrow neighbours merged, and of the node without its children. */
function divide(children, { node, depth, x, w }, value, { own, total }, width) {
  const scale = w / value;
  const cells = [];
  let left = x;
  let rest = null;
  const flush = () => {
    if (rest && rest.w * width >= MIN_REST) cells.push(rest);
    rest = null;
  };
  for (const child of children) {
    const span = child.sum(total) * scale;
    if (span <= 0) continue;
    if (span * width < MIN_WIDTH) {
      rest ||= { kind: "rest", node: child, depth: depth + 1, x: left, w: 0, count: 0 };
      rest.count += child.run;
      rest.w = left + span - rest.x;
    } else {
      flush();
      cells.push({ kind: "module", node: child, depth: depth + 1, x: left, w: span });
    }
    left += span;
  }
  flush();
  const itself = node.sum(own) * scale;
  if (left > x && itself * width >= 1) cells.push({ kind: "own", node, depth: depth + 1, x: left, w: itself });
  return cells;
}

export const fits = (name, pixels) => pixels > 60 || name.length * LETTER + 8 <= pixels;

/** Return {top, height, rotated} of each row: higher where several names fit only rotated. */
export function layOutRows(cells, width) {
  const names = [];
  let last = 0;
  for (const { kind, node, depth, w } of cells) {
    last = Math.max(last, depth);
    const pixels = w * width;
    if (kind === "module" && pixels >= ROTATED_WIDTH && !fits(node.label, pixels)) (names[depth] ||= []).push(node.label.length);
  }
  let top = 0;
  return Array.from({ length: last + 1 }, (_, depth) => {
    const rotated = (names[depth] || []).length >= FEWEST_ROTATED;
    const height = rotated ? Math.max(ROW_HEIGHT, Math.min(Math.max(...names[depth]), LONGEST) * LETTER + 14) : ROW_HEIGHT;
    const row = { top, height, rotated };
    top += height;
    return row;
  });
}

export const isRotated = (row, name, pixels) => row.rotated && pixels >= ROTATED_WIDTH && !fits(name, pixels);
