"use strict";
// The trace viewer: a list of episodes, and the one that is open.

const episodes = (() => {
  const SORTS = {
    worst: ["lowest reward first", (e) => e.reward ?? Infinity, 1],
    best: ["highest reward first", (e) => e.reward ?? -Infinity, -1],
    gap: ["largest log-prob difference first", (e) => e.gap ?? -1, -1],
    longest: ["longest first", (e) => e.length, -1],
    failed: ["failed first", (e) => (e.failed ? 0 : 1), 1],
    order: ["in the order of training", () => 0, 1],
  };
  const ROWS = 200;
  const state = { run: 0, step: "all", sort: "worst", mode: "none", wanted: "", rows: ROWS };
  const parts = {};
  let [runs, entries, current, hits] = [[], [], null, null];

  function selectOf(id, label, choices, change) {
    const select = dom.make("select", { id, "aria-label": label });
    select.append(...choices.map(([value, text]) => dom.text("option", text, { value })));
    select.addEventListener("change", () => change(select.value));
    return dom.make("label", {}, `${label} `, select);
  }

  /** The frame of the viewer, empty. */
  function build() {
    const part = dom.section("episodes");
    const withSome = runs.filter((run) => Object.keys(run.episodes).length);
    if (!withSome.length) {
      part.append(dom.make("p", {}, "No samples were recorded (--logger.record_dir)."));
      return false;
    }
    parts.steps = dom.make("span", {});
    parts.list = dom.make("ol", { className: "list", "aria-label": "Episodes" });
    parts.count = dom.make("p", { className: "dim" });
    parts.detail = dom.make("article", { className: "detail", tabIndex: -1, "aria-live": "polite" });
    parts.search = dom.make("input", { id: "search", type: "search", placeholder: "text in episodes (/)" });
    parts.search.addEventListener("change", () => search(parts.search.value));
    const names = runs.map((run, i) => [String(i), run.name]);
    const sorts = Object.entries(SORTS).map(([name, [text]]) => [name, text]);
    const tools = [
      runs.length > 1 ? selectOf("run", "run", names, (value) => choose({ run: Number(value), step: "all" })) : null,
      parts.steps,
      selectOf("sort", "sort", sorts, (value) => choose({ sort: value })),
      parts.search,
    ];
    const side = dom.make("div", { className: "side" }, parts.count, parts.list);
    part.append(dom.make("div", { className: "tools" }, tools));
    part.append(dom.make("div", { className: "viewer" }, side, parts.detail));
    parts.tip = dom.make("div", { id: "tip", hidden: true, role: "tooltip" });
    document.body.append(parts.tip);
    parts.detail.addEventListener("pointermove", tip);
    parts.detail.addEventListener("pointerleave", () => (parts.tip.hidden = true));
    return true;
  }

  function fillSteps() {
    const steps = Object.keys(runs[state.run].episodes);
    const choices = [["all", "all"], ...steps.map((step) => [step, step])];
    parts.steps.replaceChildren(selectOf("step", "step", choices, (step) => choose({ step })));
    dom.choice("step").value = state.step;
  }

  function choose(changes) {
    Object.assign(state, changes, { rows: ROWS });
    if ("run" in changes) fillSteps();
    if (("run" in changes || "step" in changes) && state.wanted) return search(state.wanted);
    fillList();
  }

  function chosenSteps() {
    const all = Object.keys(runs[state.run].episodes);
    return state.step === "all" ? all : all.filter((step) => step === state.step);
  }

  function collect() {
    const found = [];
    for (const step of chosenSteps()) {
      const { reward, length, gap, failed } = runs[state.run].episodes[step];
      const lost = new Set(failed);
      for (let i = 0; i < reward.length; i++)
        if (!hits || hits.has(`${step}/${i}`))
          found.push({ step, i, reward: reward[i], length: length[i], gap: gap[i], failed: lost.has(i) });
    }
    const [, key, sign] = SORTS[state.sort];
    return found.sort((a, b) => sign * (key(a) - key(b)) || 0);
  }

  function rowOf(entry, n) {
    const reward = dom.make("b", {}, entry.failed ? "failed" : dom.number(entry.reward));
    const rest = ` step ${entry.step} · ${entry.length} tokens${entry.gap === null ? "" : ` · Δ ${dom.number(entry.gap)}`}`;
    const button = dom.make("button", { type: "button" }, reward, rest);
    button.addEventListener("click", () => open(n));
    return dom.make("li", {}, button);
  }

  function fillList() {
    entries = collect();
    const shown = entries.slice(0, state.rows);
    parts.list.replaceChildren(...shown.map(rowOf));
    if (entries.length > shown.length) {
      const more = dom.make("button", { type: "button" }, `${entries.length - shown.length} more`);
      more.addEventListener("click", () => ((state.rows += ROWS), fillList()));
      parts.list.append(dom.make("li", {}, more));
    }
    const { share } = runs[state.run];
    const note = share < 1 ? `; the tokens of about ${Math.round(share * 100)}% of them, the worst and the best` : "";
    parts.count.textContent = `${entries.length} episodes${note}`;
    mark();
  }

  function mark() {
    const place = entries.findIndex((e) => current && e.step === current.step && e.i === current.i);
    [...parts.list.children].forEach((row, n) => {
      if (n === place) row.firstElementChild.setAttribute("aria-current", "true");
      else row.firstElementChild.removeAttribute("aria-current");
    });
    parts.list.children[place]?.scrollIntoView({ block: "nearest" });
    return place;
  }

  /** Open the episode at a place of the list. */
  async function open(n) {
    const entry = entries[n];
    if (!entry) return;
    current = entry;
    mark();
    const block = await source.step(state.run, entry.step);
    if (current === entry) showSample(block, block.samples[entry.i]);
    document.body.classList.add("reading");
  }

  /** The next or the previous one. */
  function move(by) {
    const place = mark();
    open(place < 0 ? 0 : Math.min(entries.length - 1, Math.max(0, place + by)));
  }

  function showSample(block, sample) {
    const back = dom.make("button", { type: "button", className: "back" }, "← list");
    back.addEventListener("click", close);
    const step = (by, text) => {
      const button = dom.make("button", { type: "button", title: by < 0 ? "previous (k)" : "next (j)" }, text);
      button.addEventListener("click", () => move(by));
      return button;
    };
    const modes = selectOf("colour", "colour", Object.entries(tokens.MODES), colourBy);
    const legend = dom.make("p", { className: "legend" });
    const bar = dom.make("div", { className: "tools" }, back, step(-1, "← previous"), step(1, "next →"), modes);
    const body = sample.start < 0 ? untold(sample) : tokens.show(block, sample, state.mode, legend, state.wanted);
    const tree = branches.show(block, sample, (other) => showSample(block, other));
    parts.detail.replaceChildren(
      bar,
      facts(block, sample),
      legend,
      ...[tree, ...imagesOf(block, sample)].filter(Boolean),
      ...body,
    );
    dom.choice("colour").value = state.mode;
    parts.detail.scrollTop = 0;
  }

  function untold(sample) {
    if (sample.failure) return [dom.make("h3", {}, "Why it was not trained on"), dom.text("pre", sample.failure)];
    const why =
      sample.index < 0
        ? "It was not trained on, so its tokens were not recorded."
        : "Its tokens were left out so that the page stays small (--max-mb).";
    return [dom.make("p", {}, why)];
  }

  const inWords = (value) => (typeof value === "string" ? value : JSON.stringify(value));

  function facts(block, sample) {
    const rows = [
      ["reward", dom.number(sample.reward)],
      ["score", dom.number(sample.score)],
      ["after shaping", dom.number(sample.shaped)],
      ["label", sample.label === undefined ? "" : inWords(sample.label)],
      ["ended by", sample.stop],
      [
        "tokens",
        `${sample.length}${sample.promptLength === undefined ? "" : `, ${sample.promptLength} of the prompt`}`,
      ],
      ["turns", sample.turns?.length ?? ""],
      ["step, prompt", `${current.step}, ${sample.group}`],
      ["data", block.groups[sample.group]?.datasource ?? ""],
      ["environment", block.groups[sample.group]?.environment ?? ""],
      ...Object.entries(block.groups[sample.group]?.columns ?? {}).map(([name, value]) => [name, inWords(value)]),
      ...Object.entries(sample.logs ?? {}).map(([name, value]) => [name, dom.number(value)]),
    ];
    const filled = rows.filter(([, value]) => value !== "" && value !== "–");
    return dom.make(
      "dl",
      {},
      filled.map(([name, value]) => dom.make("div", {}, dom.text("dt", name), dom.text("dd", value))),
    );
  }

  function imagesOf(block, sample) {
    return (sample.images ?? [])
      .filter((name) => `image ${name}` in block.columns)
      .map((name) => {
        const address = URL.createObjectURL(new Blob([block.columns[`image ${name}`]]));
        const image = dom.make("img", { alt: `image ${dom.visible(name)}`, src: address });
        image.addEventListener("load", () => URL.revokeObjectURL(address));
        return image;
      });
  }

  function colourBy(mode) {
    state.mode = mode;
    tokens.paint(mode);
    const select = dom.choice("colour");
    if (select) select.value = mode;
  }

  /** Colour by the next of the modes. */
  function nextColour() {
    const names = Object.keys(tokens.MODES);
    colourBy(names[(names.indexOf(state.mode) + 1) % names.length]);
  }

  function tip(event) {
    const span = event.target.closest?.(".token");
    parts.tip.hidden = !span;
    if (!span) return;
    const rows = tokens.about(Number(span.dataset.i));
    parts.tip.replaceChildren(...rows.flatMap(([name, value]) => [dom.text("span", name), dom.text("span", value)]));
    const { clientX: x, clientY: y } = event;
    const { offsetWidth: width, offsetHeight: height } = parts.tip;
    parts.tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 4))}px`;
    parts.tip.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
  }

  /** List the episodes of the chosen steps whose text holds this one, upper or lower case. */
  async function search(text) {
    state.wanted = text.toLowerCase();
    hits = state.wanted ? new Set() : null;
    const asked = hits;
    for (const step of asked ? chosenSteps() : []) {
      const block = await source.step(state.run, step);
      if (hits !== asked) return;
      block.samples.forEach((sample, i) => {
        const whole = tokens.textOf(block, sample) || sample.failure || "";
        if (whole.toLowerCase().includes(state.wanted)) asked.add(`${step}/${i}`);
      });
      parts.count.textContent = `searching, step ${step}: ${asked.size} found`;
    }
    state.rows = ROWS;
    fillList();
    if (asked) open(0);
  }

  function close() {
    document.body.classList.remove("reading");
  }

  /** All episodes of these runs; what was open stays open. */
  function show(all) {
    runs = all;
    if (!parts.list && !build()) return;
    fillSteps();
    fillList();
  }

  const focusSearch = () => parts.search?.focus();

  return { show, move, close, nextColour, focusSearch };
})();
