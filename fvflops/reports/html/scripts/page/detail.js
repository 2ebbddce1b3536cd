// The selected module in every measure, by operator and by phase.
import { byId, isolate, make } from "../base/elements.js";
import { percent, plural, short, thousands } from "../base/numbers.js";
import { formatValue, keysOf, measureOf, moduleValue, titleOf, unsupportedOf, valueOf, view, widthKey } from "../data/view.js";

const OTHER = "others";

/** Draw the facts of a plot's selected node. */
export function drawDetail(picture) {
  const { report, selected } = picture;
  const key = widthKey();
  const path = selected.path || report.title;
  const about = report.aboutOf(selected.first);
  const unsupported = unsupportedOf(report, key, selected.members);
  const blocks = [
    make(
      "div",
      {},
      make("h3", { title: path }, isolate(path)),
      make("p", { class: "quiet clip", title: about }, isolate(report.classOf(selected.first) || "no class"), about && selected.count === 1 ? isolate(`(${about})`) : null),
      selected.count > 1 ? make("p", { class: "quiet clip" }, `${plural(selected.count, "equal module")}, together. ${selected.run > 1 && selected.key !== picture.zoomed.key ? "Enter or a click opens them." : ""}`) : null,
      unsupported ? make("p", { class: "warn" }, `Lower bound: the ${titleOf(key)} of ${plural(unsupported, "unsupported op call")} inside are not counted.`) : null,
      factTable(report, selected),
    ),
    bars(key === "parameters" ? "By name" : "By operator", report.shares(key, view, selected.members, "operator"), report),
    report.phases.length > 1 ? bars("By phase", report.shares(key, view, selected.members, "phase"), report) : null,
  ];
  byId("detail").replaceChildren(...blocks.filter(Boolean));
}

/** Return a table of a node in every measure: for people, as a share, exactly, and of each of several equal modules. */
function factTable(report, { members, count }) {
  const rows = keysOf(report).map((key) => {
    const isCount = key !== "rate";
    const value = valueOf(report, key, members);
    return make(
      "tr",
      { class: key === view.measure ? "current" : undefined },
      make("th", { scope: "row" }, titleOf(key)),
      make("td", {}, formatValue(report, key, members)),
      make("td", { class: "quiet" }, isCount ? percent(value, moduleValue(report, key, 0)) : ""),
      make("td", { class: "quiet digits" }, isCount ? thousands(report.exactly(key, view, members)) : ""),
      count > 1 ? make("td", { class: "quiet" }, isCount ? `${short(value / count, report.measures.get(key).unit)} each` : "") : null,
    );
  });
  return make("table", { class: "facts" }, make("caption", { class: "hidden" }, "The selected module in every measure"), make("tbody", {}, ...rows));
}

function bars(title, shares, report) {
  const total = shares.reduce((sum, [, value]) => sum + value, 0);
  const { unit } = measureOf(report);
  const shown = shares.slice(0, 8);
  const rest = shares.slice(8).reduce((sum, [, value]) => sum + value, 0);
  if (rest) shown.push([`${shares.length - 8} ${OTHER}`, rest]);
  return make(
    "div",
    {},
    make("h3", {}, `${title}, ${measureOf(report).title}`),
    shown.length
      ? make(
          "ul",
          { class: "bars" },
          ...shown.map(([name, value]) =>
            make(
              "li",
              { title: name },
              isolate(name.slice(0, 100)),
              make("span", { class: "bar", "aria-hidden": "true" }, make("i", { style: { width: `${(100 * value) / total}%` } })),
              make("span", { class: "digits" }, `${short(value, unit)} · ${percent(value, total)}`),
            ),
          ),
        )
      : make("p", { class: "quiet" }, "Nothing in this measure."),
  );
}
