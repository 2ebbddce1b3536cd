// The reports of the page and the selected measure, phase, operator and colours, shared by all its parts.
import { short } from "../base/numbers.js";

export const reports = [];
export const view = { measure: "", phase: "", operator: "", split: "class", query: "", showEqual: false };
export const isRate = () => view.measure === "rate";
export const widthKey = () => (isRate() ? "time" : view.measure);
export const measureOf = (report = reports[0]) => report.measures.get(widthKey());

/** Return the names of the reports; of two of one name, the other has its file or number. */
export function namesOf() {
  const [first, other] = reports.map(({ title }) => title);
  if (other === undefined) return [first];
  if (first !== other) return [first, other];
  return [`${first} (this)`, `${other} (${reports[1].file || "other"})`];
}

const listeners = [];

/** Call a function after each change of the view, with the part of the page that it affects. */
export const onChange = (listener) => listeners.push(listener);

/** Draw what a change of the view affects: "all", the "plots", or plots and modules after a "search". */
export const changed = (part = "all") => listeners.forEach((listener) => listener(part));

/** Return the value of modules together, each with its submodules. */
export function valueOf(report, key, modules) {
  const sum = (name) => {
    const { total } = report.totals(name, view);
    return modules.length === 1 ? total[modules[0]] : modules.reduce((value, module) => value + total[module], 0);
  };
  if (key !== "rate") return sum(key);
  const time = sum("time");
  return time ? (sum("flops") * 1e9) / time : 0;
}

export const moduleValue = (report, key, module) => valueOf(report, key, [module]);

/** Return the number of unsupported op calls in modules, which their value lacks. */
export function unsupportedOf(report, key, modules) {
  const { unsupported } = report.totals(key === "rate" ? "flops" : key, view);
  return modules.reduce((calls, module) => calls + unsupported[module], 0);
}

export function formatValue(report, key, modules) {
  const unit = key === "rate" ? "FLOP/s" : report.measures.get(key).unit;
  return (unsupportedOf(report, key, modules) ? "≥ " : "") + short(valueOf(report, key, modules), unit);
}

export const formatModule = (report, key, module) => formatValue(report, key, [module]);

export function keysOf(report) {
  const keys = [...report.measures.keys()];
  if (keys.includes("time") && keys.includes("flops")) keys.push("rate");
  return keys;
}

export const titleOf = (key) => (key === "rate" ? "FLOP/s" : (reports.map((report) => report.measures.get(key)).find(Boolean) || {}).title);
