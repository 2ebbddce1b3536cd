// The view of a run on time.
import { Timeline } from "../charts/timeline.js";
import { addView, announce } from "../page/views.js";

addView({ name: "timeline", title: "Timeline", make: (report) => new Timeline(report, announce), has: ({ record }) => Boolean(record.timeline?.start.length) });
