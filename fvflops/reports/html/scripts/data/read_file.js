// Read the report in a file: a page, or a summary that --format json wrote.
import { Report } from "./report.js";

/** Return the report in the text of a page or of a JSON file; any other text raises Error. */
export function readFile(content) {
  const match = content.match(/<script type="application\/json" id="data">([\s\S]*?)<\/script>/);
  let record;
  try {
    record = JSON.parse(match ? match[1] : content);
  } catch (error) {
    throw new Error("it is not a complete report of fvflops");
  }
  if (record?.format === "fvflops.summary") return new Report(readSummary(renewWords(record)));
  if (record?.format !== "fvflops.report") throw new Error("it is not a report of fvflops: make one with --format html or json");
  return new Report(renewWords(record));
}

// Words of older files, and those that replaced them.
const OLD_WORDS = { free: "zero_flop", omitted: "ignored", unknown: "unsupported", unknown_elements: "unsupported_elements", unknown_places: "unsupported_locations" };

const rename = (object) => Object.fromEntries(Object.entries(object).map(([key, value]) => [OLD_WORDS[key] || key, value]));

function renewWords(record) {
  const { ledger = {}, measures, ...others } = rename(record);
  return { ...others, ledger: rename(ledger), ...(measures && { measures: measures.map(rename) }) };
}

/** Escape unprintable characters as Python does, as in the names of a page. */
export function escapeUnprintable(text) {
  const named = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu, (mark) => {
    const code = mark.codePointAt(0);
    const [letter, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
    return named[mark] || `\\${letter}${code.toString(16).padStart(digits, "0")}`;
  });
}

/** Convert a summary (--format json), which has modules but neither phases nor operators, to the data of a page. */
export function readSummary({ schema, about, columns, modules: moduleInfos, ledger, unsupported_elements, unsupported_locations = {} }) {
  const strings = [];
  const indexes = new Map();
  const intern = (text) => {
    const shown = escapeUnprintable(text);
    if (!indexes.has(shown)) indexes.set(shown, strings.push(shown) - 1);
    return indexes.get(shown);
  };
  const modules = { parent: [], name: [], class: [], about: [] };
  const at = new Map();
  const names = [];
  for (const info of moduleInfos.filter(({ name, canonical }) => name === canonical)) {
    let above = info.name;
    do above = above.slice(0, Math.max(above.lastIndexOf("."), 0));
    while (above && !at.has(above));
    modules.parent.push(info.name ? at.get(above) || 0 : -1);
    modules.name.push(intern(info.name.slice(info.name.lastIndexOf(".") + 1)));
    modules.class.push(intern(info.class_name));
    modules.about.push(intern(info.extra_repr));
    at.set(info.name, names.push(info.name) - 1);
  }
  const measures = Object.entries(columns).map(([key, counts]) => {
    const values = names.map((name) => counts[name] || 0);
    names.forEach((name, i) => i && (values[modules.parent[i]] -= counts[name] || 0));
    return { key, title: key, unit: "", note: "", values, unsupported: [] };
  });
  const rows = { module: names.map((_, i) => i), phase: names.map(() => 0), operator: names.map(() => 0) };
  const locations = Object.fromEntries(Object.entries(unsupported_locations).map(([op, calls]) => [op, Object.keys(calls).map(escapeUnprintable)]));
  return { schema, about, modules, phases: [""], operators: [""], rows, measures, ledger, unsupported_elements, unsupported_locations: locations, strings };
}
