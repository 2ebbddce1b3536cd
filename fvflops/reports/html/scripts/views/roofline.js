// The view of operators under the roofs of a device.
import { Roofline, findPoints } from "../charts/roofline.js";
import { addView } from "../page/views.js";

addView({ name: "roofline", title: "Roofline", make: (report) => new Roofline(report), has: (report) => findPoints(report).length > 0 });
