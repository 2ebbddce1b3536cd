// Light and dark.
import { byId } from "../base/elements.js";

const THEMES = { "": ["◐ Auto", "system setting"], light: ["☀ Light", "light"], dark: ["☾ Dark", "dark"] };

function themePreference(theme) {
  // Storage may be blocked for pages opened from disk.
  try {
    if (theme === undefined) return localStorage.getItem("fvflops-theme") || "";
    localStorage.setItem("fvflops-theme", theme);
  } catch (error) {
    return "";
  }
  return theme;
}

function setTheme(theme) {
  const chosen = theme in THEMES ? theme : "";
  document.documentElement.dataset.theme = chosen;
  const [label, description] = THEMES[chosen];
  byId("theme").textContent = label;
  byId("theme").setAttribute("aria-label", `Colours: ${description}; press to change`);
}

/** Set the preferred theme, and the next one at each press of the button. */
export function listenToTheme() {
  setTheme(themePreference());
  byId("theme").addEventListener("click", () => {
    const order = Object.keys(THEMES);
    const next = order[(order.indexOf(document.documentElement.dataset.theme) + 1) % order.length];
    themePreference(next);
    setTheme(next);
  });
}
