// The colours of the plot by name.
import { byId, isolate, make } from "../base/elements.js";
import { reports, view, widthKey } from "../data/view.js";
import { COLOURS, paint } from "./colours.js";

const OTHER = "others";

export function drawLegend() {
  const paints = paint(reports[0]);
  const legend = byId("legend");
  if (paints.scale) {
    const [from, low, high, to] = paints.scale;
    const bar = make("span", { class: "ramp", "aria-hidden": "true" });
    const middle = low === "less" ? "var(--same), " : "";
    bar.style.background = `linear-gradient(to right, var(--${low}), ${middle}var(--${high}))`;
    legend.replaceChildren(make("span", {}, from), bar, make("span", {}, to), make("span", { class: "hint" }, paints.note || ""));
    return;
  }
  const { groups } = paints;
  const ran = new Set(reports.flatMap((report) => report.shares(widthKey(), view, [0], "phase").map(([name]) => name)));
  const present = view.split === "phase" ? groups.names.filter((name) => ran.has(name)) : groups.names;
  const swatch = (k, name) => make("span", { class: "swatch", title: name }, make("i", { style: { background: `var(--c${k})` } }), isolate(name.slice(0, 60)));
  const items = present.map((name) => swatch(groups.of(name), name || "(no class)"));
  if (groups.more) items.push(swatch(COLOURS, OTHER));
  legend.replaceChildren(...items);
}
