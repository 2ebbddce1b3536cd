// Format numbers for people.

const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"]];
const TIMES = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
const PARAMETERS = [[1e9, "B"], [1e6, "M"], [1e3, "K"]];

/** Return a value with three digits and its unit: "", "B", "FLOP/s", "ns", or "parameters", which are in B, M and K. */
export function short(value, unit = "") {
  if (unit === "parameters") return parameters(value);
  if (unit === "ns") {
    const [size, name] = TIMES.find(([size]) => Math.abs(value) >= size) || TIMES[3];
    return `${Number((value / size).toPrecision(3)).toLocaleString("en")} ${name}`;
  }
  const rounded = Number(value.toPrecision(3));
  const [size, prefix] = PREFIXES.find(([size]) => Math.abs(rounded) >= size) || [1, ""];
  const number = Number((rounded / size).toPrecision(3)).toString();
  return unit ? `${number} ${prefix}${unit}` : number + prefix;
}

/** Return a number of parameters as papers write it: 405.9B, 109.5M. */
function parameters(count) {
  const [size, suffix] = PARAMETERS.find(([size]) => Math.abs(count) >= size * 0.99995) || [];
  return size ? `${(count / size).toFixed(1)}${suffix}` : String(count);
}

export function percent(part, total) {
  if (!total) return "";
  const share = (100 * part) / total;
  if (part && Math.abs(share) < 0.05) return "<0.1%";
  return `${share.toFixed(1)}%`;
}

/** Return a difference with its sign. */
export const signed = (value, unit) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${short(Math.abs(value), unit)}`;

export const thousands = (value) => (typeof value === "bigint" || Number.isInteger(value) ? value.toLocaleString("en") : String(value));
export const plural = (count, noun) => `${thousands(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Return items as one enumeration: "a", "a and b", "a, b and c". */
export const enumerate = (items) => (items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items[items.length - 1]}`);
