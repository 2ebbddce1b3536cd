// Which modules are equal: one class and the same counts, in themselves and in all their submodules.

// Measured values differ from call to call.
const MEASURED = new Set(["time"]);

/** Return a number for each module, the same for equal modules; `other` returns a further mark to tell modules apart. */
export function findEqual(report, other = () => "") {
  const numbers = new Map();
  const intern = (text) => {
    if (!numbers.has(text)) numbers.set(text, numbers.size);
    return numbers.get(text);
  };
  const own = Array.from({ length: report.size }, () => []);
  const measures = [...report.measures.values()].filter(({ key }) => !MEASURED.has(key));
  const { module, phase, operator } = report.rows;
  for (let row = 0; row < module.length; row++) {
    let text = `${phase[row]} ${operator[row]}`;
    let counted = false;
    for (const { values, unsupported } of measures) {
      const calls = unsupported.size ? unsupported.get(row) || 0 : 0;
      text += calls ? ` ${values[row]}+${calls}` : ` ${values[row]}`;
      counted ||= values[row] !== 0 || calls;
    }
    if (counted) own[module[row]].push(intern(text));
  }
  const equal = new Int32Array(report.size);
  for (let i = report.size - 1; i >= 0; i--) {
    const inside = report.children[i].map((child) => equal[child]);
    own[i].sort((a, b) => a - b);
    equal[i] = intern(`${report.classOf(i)}\n${own[i]}\n${inside}\n${other(i)}`);
  }
  return equal;
}
