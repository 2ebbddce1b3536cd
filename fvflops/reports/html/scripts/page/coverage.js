// Which ops the convention counts, and how the report was made.
import { byId, isolate, make } from "../base/elements.js";
import { plural, short, thousands } from "../base/numbers.js";
import { namesOf, reports } from "../data/view.js";

export function drawLedger() {
  const { ledger, unsupported_elements: elements, unsupported_locations: locations = {} } = reports[0].record;
  const labels = {
    counted: ["counted", "by a formula of this convention"],
    zero_flop: ["zero-FLOP", "views, copies, creation of tensors"],
    ignored: ["ignored", "arithmetic that this convention does not count"],
    unsupported: ["unsupported", "no formula, so in no total"],
  };
  const cards = Object.entries(labels).map(([status, [name, meaning]]) => {
    const ops = ledger[status] || [];
    const calls = ops.reduce((sum, [, count]) => sum + count, 0);
    return make(
      "div",
      { class: `status ${status} ${calls ? "some" : "none"}` },
      make("h3", {}, make("i", { "aria-hidden": "true" }), name),
      make("p", { class: "big" }, thousands(calls), make("span", { class: "quiet" }, calls === 1 ? " call" : " calls")),
      make("p", { class: "quiet" }, meaning),
      ops.length
        ? make(
            "details",
            { open: status === "unsupported" || status === "ignored" || ops.length <= 6 },
            make("summary", {}, plural(ops.length, "operator")),
            make("ul", {}, ...ops.map(([op, count]) => make("li", {}, isolate(op.slice(0, 300), { title: op }), make("span", { class: "digits" }, `× ${thousands(count)}`), op in elements ? make("span", { class: "warn" }, ` ${short(Number(elements[op]))} output elements`) : null, op in locations ? make("div", { class: "quiet" }, "in ", isolate(locations[op][0]), locations[op].length > 1 ? ` and ${plural(locations[op].length - 1, "more location")}` : "") : null))),
          )
        : null,
    );
  });
  byId("ledger").replaceChildren(...cards);
  const unsupported = (ledger.unsupported || []).length;
  byId("ledger-hint").textContent = unsupported
    ? `${plural(unsupported, "unsupported operator")}: the totals are lower bounds.`
    : "All operators that ran are supported by this convention.";
  byId("ledger-hint").classList.toggle("warn", unsupported > 0);
}

export function drawAbout() {
  const { about } = reports[0].record;
  const first = ["model", "inputs", "table", "multiply_add", "description", "device", "execution", "fvflops", "torch", "python"];
  const keys = [...first.filter((key) => key in about), ...Object.keys(about).filter((key) => !first.includes(key))];
  const OVERHEADS = { overhead_ns: "profiling overhead, subtracted", overhead_ns_per_op: "of that per op" };
  const labels = { table: "convention", multiply_add: "FLOPs per multiply-add", ...OVERHEADS };
  byId("about").replaceChildren(...keys.map((key) => make("div", {}, make("dt", {}, labels[key] || key.replaceAll("_", " ")), make("dd", { title: about[key] }, isolate(key in OVERHEADS ? short(Number(about[key]), "ns") : about[key].slice(0, 2000))))));
  const isNamed = reports[0].title !== reports[0].classOf(0);
  const parts = [isNamed && reports[0].classOf(0), about.inputs, about.table && `convention ${about.table}`, about.multiply_add && `${about.multiply_add} FLOP${about.multiply_add === "1" ? "" : "s"} per multiply-add`].filter(Boolean);
  byId("title").replaceChildren(...namesOf().flatMap((name, index) => [...(index ? [" → "] : []), isolate(name.slice(0, 200), { title: name })]));
  byId("subtitle").replaceChildren(...parts.flatMap((part, index) => [...(index ? [" · "] : []), isolate(part.slice(0, 300))]));
}
