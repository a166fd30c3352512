"use strict";
// Charts over steps, drawn by uPlot: a line per run, values under the pointer, alarms as marks.

const curves = (() => {
  const FIRST = [
    "train/reward",
    "train/score",
    "train/response_length",
    "train/entropy",
    "train/kl",
    "train/policy_loss",
    "train/actor_grad_norm",
    "train/grad_norm",
    "train/logprobs_diff",
    "rollout/sync_error",
    "rollout/staleness_mean",
    "rollout/failed_samples",
    "perf/tokens_per_second",
    "timing/step_total",
  ];
  const PHASES = ["generation", "make_experience", "ppo_train", "broadcast", "reference_sync"];
  const HEIGHT = 170;
  const drawn = new Map();
  let runs = [];

  const nearScreen = new IntersectionObserver(
    (entries) => entries.filter((e) => e.isIntersecting).forEach((e) => draw(e.target)),
    { rootMargin: "400px" },
  );
  const resized = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries)
      drawn.get(target)?.setSize({ width: Math.max(200, contentRect.width), height: HEIGHT });
  });

  const lines = () => Array.from({ length: 6 }, (_, i) => dom.colour(`line-${i}`));

  /** All values of a metric, of steps and evaluations: [steps, values of run 0, values of run 1, ...]. */
  function series(name) {
    const tables = runs.map((run) => (name in run.steps.metrics ? run.steps : run.evaluations));
    const steps = [...new Set(tables.flatMap((t) => (name in t.metrics ? t.step : [])))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, i) => [step, i]));
    const values = tables.map((t) => {
      const row = new Array(steps.length).fill(null);
      (t.metrics[name] ?? []).forEach((value, i) => (row[place.get(t.step[i])] = value));
      return row;
    });
    return [steps, ...values];
  }

  const axis = () => ({
    stroke: dom.colour("dim"),
    grid: { stroke: dom.colour("line"), width: 1 },
    ticks: { stroke: dom.colour("line"), width: 1 },
    font: "11px system-ui, sans-serif",
  });

  /** Vertical lines where an alarm was raised. */
  const marks = {
    hooks: {
      draw: (chart) => {
        const steps = runs.flatMap((run) => run.alarms.filter((a) => a.state === "raised").map((a) => a.step));
        const { ctx, bbox } = chart;
        ctx.save();
        ctx.strokeStyle = dom.colour("bad");
        ctx.setLineDash([4, 4]);
        for (const step of steps) {
          const x = chart.valToPos(step, "x", true);
          if (x < bbox.left || x > bbox.left + bbox.width) continue;
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
        ctx.restore();
      },
    },
  };

  /** What a chart shows of the steps: of a single one, its neighbours too. */
  const aroundOne = ({ data: [steps] }, from, to) => (steps.length === 1 ? [steps[0] - 1, steps[0] + 1] : [from, to]);

  /** What a chart shows of the values: of values that are all the same, their neighbours too. */
  const aroundFlat = (_, least, most) =>
    least === most ? [least - 1, most + 1] : uPlot.rangeNum(least, most, 0.1, true);

  function options(width, parts, scales = {}) {
    return {
      width,
      height: HEIGHT,
      cursor: { sync: { key: "steps" }, points: { size: 6 } },
      scales: {
        x: { time: false, range: aroundOne },
        y: { range: aroundFlat },
        ...scales,
      },
      axes: [
        { ...axis(), size: 30 },
        { ...axis(), size: 56, values: (_, ticks) => ticks.map(dom.number) },
      ],
      series: [{ label: "step" }, ...parts],
      plugins: [marks],
    };
  }

  function lineOf(label, stroke, points) {
    return { label, stroke, width: 1.5, spanGaps: true, points: { show: points }, value: (_, v) => dom.number(v) };
  }

  function chartOf(holder, width) {
    if (holder.dataset.phases) return phases(runs[Number(holder.dataset.run)], holder, width);
    const data = series(holder.dataset.metric);
    const few = data[0].length < 30;
    const parts = runs.map((run, i) => lineOf(runs.length > 1 ? dom.visible(run.name) : "value", lines()[i % 6], few));
    return new uPlot(options(width, parts), data, holder);
  }

  /** Stacked areas of the seconds in each phase. */
  function phases(run, holder, width) {
    const { step, metrics } = run.steps;
    const value = (name, i) => metrics[`timing/${name}`]?.[i] ?? 0;
    const names = PHASES.filter((name) => metrics[`timing/${name}`]?.some((v) => v > 0));
    const raw = names.map((name) => step.map((_, i) => value(name, i)));
    raw.push(step.map((_, i) => Math.max(0, value("step_total", i) - raw.reduce((sum, row) => sum + row[i], 0))));
    const labels = [...names.map((name) => name.replaceAll("_", " ")), "other"];
    const stacked = [];
    raw.forEach((row, n) => stacked.push(row.map((v, i) => v + (n ? stacked[n - 1][i] : 0))));
    const shades = [...lines().slice(0, names.length), dom.colour("dim")];
    const parts = labels.map((label, n) => ({
      ...lineOf(label, shades[n], false),
      fill: shades[n],
      value: (_, __, ___, i) => (i === null ? "–" : `${dom.number(raw[n][i])} s`),
    }));
    // the largest sum first, so that the smaller ones are painted over it
    const fromZero = { y: { range: (_, __, most) => [0, most || 1] } };
    return new uPlot(options(width, parts.reverse(), fromZero), [step, ...stacked.reverse()], holder);
  }

  function draw(holder) {
    nearScreen.unobserve(holder);
    drawn.get(holder)?.destroy();
    drawn.set(holder, chartOf(holder, Math.max(200, holder.clientWidth)));
    resized.observe(holder);
  }

  function holderOf(title, data) {
    const holder = dom.make("div", { className: "chart" });
    Object.assign(holder.dataset, data);
    nearScreen.observe(holder);
    return dom.make("figure", {}, dom.text("figcaption", title), holder);
  }

  function metricNames() {
    const all = new Set(runs.flatMap((r) => [...Object.keys(r.steps.metrics), ...Object.keys(r.evaluations.metrics)]));
    return [...all].sort();
  }

  function fill(grid, names) {
    grid.replaceChildren(...names.map((name) => holderOf(name, { metric: name })));
  }

  function forget() {
    for (const [holder, chart] of drawn) {
      resized.unobserve(holder);
      chart.destroy();
    }
    drawn.clear();
  }

  /** All charts of these runs. */
  function show(all) {
    runs = all;
    forget();
    const names = metricNames();
    const judged = names.filter((name) => /_pass\d+$/.test(name));
    const first = [...judged, ...FIRST.filter((name) => names.includes(name))];
    const others = names.filter((name) => !first.includes(name));
    const part = dom.section("curves");
    const grid = dom.make("div", { className: "grid" });
    fill(grid, first);
    const more = dom.make("div", { className: "grid" });
    const search = dom.make("input", { type: "search", placeholder: "name of a metric", ariaLabel: "Find a metric" });
    const box = dom.make("details", {}, dom.make("summary", {}, `${others.length} more metrics`), search, more);
    const filled = () =>
      fill(
        more,
        others.filter((name) => name.includes(search.value)),
      );
    box.addEventListener("toggle", () => box.open && filled());
    search.addEventListener("input", filled);
    if (runs.some((run) => run.alarms.length))
      part.append(dom.make("p", { className: "dim" }, "Dashed: an alarm was raised."));
    part.append(first.length ? grid : dom.make("p", {}, "No metrics were logged."), box);
    const timed = dom.section("phases");
    runs.forEach((run, i) => {
      if (!run.steps.metrics["timing/step_total"]) return;
      timed.append(holderOf(runs.length > 1 ? run.name : "seconds, stacked", { phases: "1", run: String(i) }));
    });
    if (timed.childElementCount === 1) timed.append(dom.make("p", {}, "No times were logged."));
  }

  /** The charts that are on screen, in the colours of now. */
  const redraw = () => [...drawn.keys()].forEach(draw);

  return { show, redraw };
})();
