"use strict";
// Puts the page together, and reads anew while a run goes on.

(() => {
  const EVERY = 3000; // milliseconds between two looks at a run that goes on
  const KEYS = {
    j: () => episodes.move(1),
    ArrowDown: () => episodes.move(1),
    k: () => episodes.move(-1),
    ArrowUp: () => episodes.move(-1),
    c: () => episodes.nextColour(),
    "/": () => episodes.focusSearch(),
    t: () => switchTheme(),
    Escape: () => episodes.close(),
  };
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function switchTheme() {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    curves.redraw();
  }

  function onKey(event) {
    const typing = event.target.closest?.("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
    const inViewer = !event.key.startsWith("Arrow") || event.target.closest?.("#episodes");
    const action = KEYS[event.key];
    if (!action || !inViewer) return;
    event.preventDefault();
    action();
  }

  function show(overview) {
    const { runs } = overview;
    dom.find("title").textContent = runs.map((run) => dom.visible(run.name)).join(" and ");
    tables.show(runs);
    curves.show(runs);
    episodes.show(runs);
  }

  /** The last step of every run: whether there is more to show. */
  const stamp = ({ runs }) =>
    JSON.stringify(
      runs.map((run) => [
        run.steps.step.at(-1),
        run.evaluations.step.at(-1),
        run.alarms.length,
        Object.keys(run.episodes).length,
      ]),
    );

  async function follow(shown) {
    const status = dom.find("status");
    for (;;) {
      await new Promise((done) => setTimeout(done, EVERY));
      try {
        const overview = await source.overview();
        status.textContent = `live, ${new Date().toLocaleTimeString()}`;
        if (stamp(overview) !== shown) show(overview);
        shown = stamp(overview);
      } catch {
        status.textContent = "the server does not answer";
      }
    }
  }

  async function start() {
    const overview = await source.overview();
    show(overview);
    dom.find("theme").addEventListener("click", switchTheme);
    dark.addEventListener("change", curves.redraw);
    document.addEventListener("keydown", onKey);
    root.dataset.ready = "true";
    if (source.live) await follow(stamp(overview));
  }

  start().catch((error) => (dom.find("status").textContent = `the page does not work here: ${error}`));
})();
