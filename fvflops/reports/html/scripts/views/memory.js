// The view of the memory of a run.
import { MemoryChart } from "../charts/memory.js";
import { addView, openModule } from "../page/views.js";

addView({ name: "memory", title: "Memory", make: (report) => new MemoryChart(report, openModule), has: ({ record }) => Boolean(record.memory?.at.length) });
