"use strict";
// The tokens of one episode as text, coloured by what is known of each.

const tokens = (() => {
  const MODES = {
    none: "no colours",
    difference: "log-prob difference (engine − trainer)",
    advantage: "advantage",
    version: "weight version",
    mask: "trained on or not",
    logprob: "log-prob of the engine",
  };
  const AT_ONCE = 4000;
  const LEAST_SCALE = { difference: 0.01, advantage: 1e-6, logprob: 1 };
  /** @type {[string, RegExp][]} */
  const REGIONS = [
    ["tool call", /<tool_call>[\s\S]*?(?:<\/tool_call>|$)|\[TOOL_CALLS\][^\n]*|<function=[\s\S]*?(?:<\/function>|$)/g],
    ["tool response", /<tool_response>[\s\S]*?(?:<\/tool_response>|$)/g],
    ["thinking", /<think>[\s\S]*?(?:<\/think>|$)/g],
  ];
  let view = null; // what is shown: sample, its columns, spans by token, scales

  /** The columns of one sample. */
  function columnsOf(block, sample) {
    const cut = (name) => block.columns[name].subarray(sample.start, sample.start + sample.length);
    const names = ["piece", "trainable", "version", "logprob", "difference", "advantage"];
    return Object.fromEntries(names.map((name) => [name, cut(name)]));
  }

  /** The texts of a sample's tokens from one place to another. */
  function textOf(block, sample, from = 0, to = sample.length) {
    if (sample.start < 0) return "";
    const numbers = block.columns.piece.subarray(sample.start + from, sample.start + to);
    return Array.from(numbers, (number) => block.pieces[number]).join("");
  }

  /** Prompt, turns of the model and what stands between them: [title, from, to, trained]. */
  function segments(sample) {
    const found = [];
    let place = 0;
    const between = (to, title) => to > place && found.push([title, place, to, false]);
    (sample.turns ?? []).forEach(([start, end, reason, reward], i) => {
      between(start, i ? "environment" : "prompt");
      const earned = reward == null ? "" : `, reward ${reward}`;
      found.push([`turn ${i + 1}${reason ? `, ended by ${reason}` : ""}${earned}`, start, end, true]);
      place = end;
    });
    between(sample.length, found.length ? "environment" : "prompt");
    return found;
  }

  /** Where the values of a mode are at full colour: all but a hundredth of the tokens are below. */
  function scaleOf(values, least) {
    const sizes = Array.from(values, Math.abs)
      .filter(Number.isFinite)
      .sort((a, b) => a - b);
    return Math.max(least, sizes[Math.floor((sizes.length - 1) * 0.99)] ?? 0);
  }

  function tint(mode, i) {
    const { columns, scales, versions } = view;
    if (mode === "none") return "";
    if (mode === "mask") return columns.trainable[i] ? "rgb(var(--hot) / 0.35)" : "";
    if (!columns.trainable[i]) return "";
    if (mode === "version") return `rgb(var(--shade-${versions.indexOf(columns.version[i]) % 6}) / 0.4)`;
    const value = columns[mode][i];
    if (!Number.isFinite(value)) return "";
    const share = Math.min(1, Math.abs(value) / scales[mode]);
    return `rgb(var(--${value < 0 ? "cold" : "hot"}) / ${(0.75 * share).toFixed(3)})`;
  }

  /** Colour all tokens that are shown. */
  function paint(mode) {
    if (!view) return;
    view.mode = mode;
    view.spans.forEach((span, i) => (span.style.background = tint(mode, i)));
    view.legend.replaceChildren(...legendOf(mode));
  }

  function legendOf(mode) {
    const { scales, versions, columns } = view;
    const swatch = (background, label) => {
      const mark = dom.make("i", { className: "swatch" });
      mark.style.background = background;
      return dom.make("span", {}, mark, ` ${label} `);
    };
    if (mode === "none") return [];
    if (mode === "mask") return [swatch("rgb(var(--hot) / 0.35)", "trained on")];
    if (mode === "version")
      return versions.map((version, n) => swatch(`rgb(var(--shade-${n % 6}) / 0.4)`, `version ${version}`));
    if (!columns[mode].some((v, i) => columns.trainable[i] && Number.isFinite(v))) return ["not measured"];
    const most = dom.number(Number(scales[mode].toPrecision(3)));
    const below = swatch("rgb(var(--cold) / 0.75)", `−${most} and less`);
    return mode === "logprob" ? [below] : [below, swatch("rgb(var(--hot) / 0.75)", `${most} and more`)];
  }

  function spanOf(i, hits) {
    const piece = view.block.pieces[view.columns.piece[i]];
    const span = dom.make("span", { className: "token" }, piece === "" ? "▯" : dom.visible(piece));
    if (piece === "") span.classList.add("part");
    if (hits.has(i)) span.classList.add("hit");
    span.dataset.i = String(i);
    span.style.background = tint(view.mode, i);
    view.spans.set(i, span);
    return span;
  }

  /** Numbers of the tokens that hold a part of a text. */
  function hitsOf(from, to, wanted) {
    const hits = new Set();
    if (!wanted) return hits;
    const { text, starts } = placed(from, to);
    const lower = text.toLowerCase();
    for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, at + wanted.length))
      for (let i = 0; i < starts.length; i++)
        if (starts[i] < at + wanted.length && (starts[i + 1] ?? text.length) > at) hits.add(from + i);
    return hits;
  }

  /** The text of some tokens and where each begins in it. */
  function placed(from, to) {
    const starts = [];
    let text = "";
    for (let i = from; i < to; i++) {
      starts.push(text.length);
      text += view.block.pieces[view.columns.piece[i]];
    }
    return { text, starts };
  }

  /** Tool calls and thinking among some tokens: what, first token, the one after the last. */
  function regionsOf(from, to) {
    const { text, starts } = placed(from, to);
    const found = [];
    for (const [what, pattern] of REGIONS)
      for (const match of text.matchAll(pattern)) {
        const last = match.index + match[0].length;
        const first = starts.findLastIndex((start) => start <= match.index);
        const end = starts.findIndex((start) => start >= last);
        found.push([what, from + first, end < 0 ? to : from + end]);
      }
    return found.sort((a, b) => a[1] - b[1]);
  }

  /** Spans of tokens [from, to), with regions as boxes of their own. */
  function spans(from, to, wanted) {
    const hits = hitsOf(from, to, wanted);
    const parts = [];
    let place = from;
    const plain = (end) => Array.from({ length: Math.max(0, end - place) }, (_, n) => spanOf(place + n, hits));
    for (const [what, start, end] of regionsOf(from, to)) {
      if (start < place) continue;
      parts.push(...plain(start));
      place = start;
      parts.push(dom.make("span", { className: "region", "data-what": what }, plain(end)));
      place = end;
    }
    return [...parts, ...plain(to)];
  }

  function segmentOf([title, from, to, trained], wanted) {
    const body = dom.make("div", { className: "text" });
    const head = dom.make("summary", {}, `${title} · ${to - from} tokens`);
    const box = dom.make("details", { className: trained ? "segment own" : "segment", open: true }, head, body);
    const more = (start) => {
      const end = Math.min(to, start + AT_ONCE);
      body.append(...spans(start, end, wanted));
      if (end === to) return;
      const button = dom.make("button", { type: "button" }, `${to - end} more tokens`);
      button.addEventListener("click", () => (button.remove(), more(end)));
      body.append(button);
    };
    more(from);
    return box;
  }

  /** The text of an episode. legend: the element for the meaning of the colours. wanted: text to mark, lower case. */
  function show(block, sample, mode, legend, wanted) {
    const columns = columnsOf(block, sample);
    const trained = (name) => columns[name].filter((_, i) => columns.trainable[i]);
    const scales = Object.fromEntries(
      Object.entries(LEAST_SCALE).map(([name, least]) => [name, scaleOf(trained(name), least)]),
    );
    const versions = [...new Set(trained("version"))].sort((a, b) => a - b);
    view = { block, sample, columns, scales, versions, legend, mode, spans: new Map() };
    const parts = segments(sample).map((segment) => segmentOf(segment, wanted));
    paint(mode);
    return parts;
  }

  /** What is known of the token under the pointer, as [name, value] pairs. */
  function about(i) {
    const { block, columns } = view;
    const piece = block.pieces[columns.piece[i]];
    const rows = [
      ["token", `${i}: ${JSON.stringify(piece)}`],
      ["id", block.ids[columns.piece[i]]],
    ];
    if (!columns.trainable[i]) return [...rows, ["not trained on", ""]];
    const [engine, gap] = [columns.logprob[i], columns.difference[i]];
    return [
      ...rows,
      ["engine log-prob", dom.number(engine)],
      ["trainer log-prob", dom.number(engine - gap)],
      ["difference", dom.number(gap)],
      ["advantage", dom.number(columns.advantage[i])],
      ["version", columns.version[i]],
    ];
  }

  return { MODES, show, paint, about, textOf };
})();
