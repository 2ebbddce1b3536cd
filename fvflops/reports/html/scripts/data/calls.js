// The calls of a timed run, and what is drawn of them in an interval.

/** The calls of a report's timeline, in columns, with the parent of each (-1 for none) and the rows of all tracks. */
export class Calls {
  constructor(report) {
    const { timeline } = report.record;
    Object.assign(this, timeline);
    this.report = report;
    this.size = this.start.length;
    this.parent = new Int32Array(this.size).fill(-1);
    this.end = 0;
    const depths = this.tracks.map(() => 0);
    const open = this.tracks.map(() => []);
    for (let i = 0; i < this.size; i++) {
      const stack = open[this.track[i]];
      while (stack.length && this.depth[stack[stack.length - 1]] >= this.depth[i]) stack.pop();
      if (stack.length) this.parent[i] = stack[stack.length - 1];
      stack.push(i);
      depths[this.track[i]] = Math.max(depths[this.track[i]], this.depth[i] + 1);
      this.end = Math.max(this.end, this.start[i] + this.duration[i]);
    }
    let rows = 0;
    this.firstRow = depths.map((depth) => (rows += depth) - depth);
    this.rows = rows;
  }

  isModule(i) {
    return this.label[i] < 0;
  }

  nameOf(i) {
    return this.isModule(i) ? this.report.nameOf(this.module[i]) : this.labels[this.label[i]];
  }

  phaseOf(i) {
    return this.phases[this.phase[i]];
  }

  rowOf(i) {
    return this.firstRow[this.track[i]] + this.depth[i];
  }

  /** Return the calls that overlap an interval: {call, row, x, w} in shares of it, and merged ones with their `count`. */
  visible(from, to, width, least = 1) {
    const scale = 1 / (to - from);
    const cells = [];
    const last = new Array(this.rows).fill(null); // of each row, the merged cell that may grow
    for (let i = 0; i < this.size; i++) {
      const start = Math.max(this.start[i], from);
      const end = Math.min(this.start[i] + this.duration[i], to);
      if (end <= start) continue;
      const row = this.rowOf(i);
      const x = (start - from) * scale;
      const w = (end - start) * scale;
      if (w * width >= least) {
        cells.push({ call: i, row, x, w, count: 1 });
        last[row] = null;
      } else if (last[row] && (x - last[row].x - last[row].w) * width < least) {
        last[row].w = x + w - last[row].x;
        last[row].count += 1;
      } else cells.push((last[row] = { call: i, row, x, w, count: 1 }));
    }
    return cells;
  }
}

/** Return round positions on an axis of about `count` parts. */
export function ticks(from, to, count) {
  const rough = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const positions = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) positions.push(at);
  return positions;
}
