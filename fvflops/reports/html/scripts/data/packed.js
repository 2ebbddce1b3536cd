// Columns in which equal layers repeat a pattern.

const valueAt = (value, step, repetition) => (step ? value + step * repetition : value);

/** Return the values of a column: a list, or runs of [repetitions, values, steps by which each value grows]. */
export function unpack(column) {
  if (Array.isArray(column)) return column;
  const values = [];
  for (const [times, pattern, steps = []] of column.runs) {
    for (let repetition = 0; repetition < times; repetition++) pattern.forEach((value, i) => values.push(valueAt(value, steps[i], repetition)));
  }
  return values;
}
