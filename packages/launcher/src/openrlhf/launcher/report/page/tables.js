"use strict";
// What is told in words and tables: the summary, alarms, configuration and sources.

const tables = (() => {
  const named = (runs, run, part) => (runs.length > 1 ? [dom.text("h3", run.name), part] : [part]);

  function summary(runs) {
    const part = dom.section("summary");
    for (const run of runs) {
      const words = run.words.length ? run.words : ["Nothing was logged yet."];
      const list = dom.make(
        "ul",
        { className: "words" },
        words.map((sentence) => dom.text("li", sentence)),
      );
      const rows = Object.entries(run.sources).map(([flag, value]) => [`--${flag}`, value]);
      const from = dom.make("details", {}, dom.make("summary", {}, "Models, data and rewards"), sources(run, rows));
      part.append(...named(runs, run, list), from);
    }
  }

  function sources(run, rows) {
    return dom.make("div", {}, dom.table(["flag", "value"], [...rows, ["folder", run.folder]]));
  }

  function alarms(runs) {
    const part = dom.section("alarms");
    for (const run of runs) {
      const rows = run.alarms.map((alarm) => [
        dom.make("span", { className: `chip ${alarm.state === "raised" ? "bad" : "good"}` }, dom.visible(alarm.state)),
        String(alarm.step),
        String(alarm.name).replaceAll("_", " "),
        told(alarm.evidence),
        told(alarm.fix),
      ]);
      const table = dom.table(["", "step", "alarm", "what was seen", "what to turn"], rows);
      part.append(...named(runs, run, rows.length ? table : dom.make("p", {}, "None was raised.")));
    }
  }

  const told = (value) => (typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value));

  function settings(runs) {
    const part = dom.section("settings");
    if (runs.length > 1) part.append(...differences(runs));
    for (const run of runs) {
      const rows = run.settings.map(([name, value, fallback, help]) => ({ name, value, fallback, help }));
      const given = rows.filter((row) => row.value !== row.fallback);
      const table = dom.table(["flag", "value", "default"], given.map(rowOf));
      part.append(...named(runs, run, given.length ? table : dom.make("p", {}, "No configuration was saved.")));
      const others = rows.filter((row) => row.value === row.fallback);
      if (!others.length) continue;
      const head = dom.make("summary", {}, `${others.length} flags at their defaults`);
      const rest = dom.make("details", {}, head);
      rest.addEventListener("toggle", () => rest.append(dom.table(["flag", "value", ""], others.map(rowOf))), {
        once: true,
      });
      part.append(rest);
    }
  }

  function rowOf({ name, value, fallback, help }) {
    const flag = dom.text("code", `--${name}`, { title: dom.visible(help) });
    const resolved = fallback === "auto" ? "auto, resolved to this" : fallback;
    return [flag, value, value === fallback ? "" : resolved];
  }

  /** The flags in which the runs differ. */
  function differences(runs) {
    const values = runs.map((run) => new Map(run.settings.map(([name, value]) => [name, value])));
    const names = [...new Set(values.flatMap((of) => [...of.keys()]))];
    const differ = names.filter((name) => new Set(values.map((of) => of.get(name))).size > 1);
    const rows = differ.map((name) => [`--${name}`, ...values.map((of) => of.get(name) ?? "–")]);
    return [
      dom.make("h3", {}, "Where they differ"),
      rows.length
        ? dom.table(["flag", ...runs.map((run) => run.name)], rows)
        : dom.make("p", {}, "In no flag of their configurations."),
    ];
  }

  /** All of them. */
  function show(runs) {
    summary(runs);
    alarms(runs);
    settings(runs);
  }

  return { show };
})();
