"use strict";
// The branches of one episode as a tree: samples that share their first tokens share a way from the root.

const branches = (() => {
  /** How many first tokens two samples share. */
  function shared(block, one, other) {
    const tokens = block.columns.piece;
    const most = Math.min(one.length, other.length);
    let n = 0;
    while (n < most && tokens[one.start + n] === tokens[other.start + n]) n++;
    return n;
  }

  /** Nodes {from, to, samples, children}: tokens [from, to) are the same in all samples of a node. */
  function treeOf(block, samples, from = 0) {
    const [first, ...others] = samples;
    const to = Math.min(first.length, ...others.map((other) => shared(block, first, other)));
    const node = { from, to, samples, children: [] };
    const next = new Map();
    for (const sample of samples) {
      if (samples.length === 1 || sample.length === to) continue;
      const token = block.columns.piece[sample.start + to];
      next.set(token, [...(next.get(token) ?? []), sample]);
    }
    node.children = [...next.values()].map((part) => treeOf(block, part, to));
    if (samples.length === 1) node.to = first.length;
    return node;
  }

  function label(block, node) {
    const text = tokens.textOf(block, node.samples[0], node.from, Math.min(node.to, node.from + 40)).trim();
    return `${node.to - node.from} tokens: ${text.slice(0, 80)}${text.length > 80 ? "…" : ""}`;
  }

  /** A list of a node's ways. open: called with the sample of a leaf. */
  function list(block, node, current, open) {
    const ends = node.samples.filter((sample) => sample.length === node.to);
    const items = ends.map((sample) => {
      const reward = `branch ${sample.place}, reward ${dom.number(sample.reward)}`;
      const button = dom.make("button", { type: "button", className: "branch" }, reward);
      if (sample.index === current.index) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => open(sample));
      return dom.make("li", {}, button);
    });
    const below = node.children.map((child) => list(block, child, current, open));
    return dom.make("li", {}, dom.text("span", label(block, node)), dom.make("ul", {}, items, below));
  }

  /** The tree of the episode that a sample is a branch of; null where it has one branch. */
  function show(block, sample, open) {
    const same = block.samples.filter(
      (other) => other.start >= 0 && other.group === sample.group && other.episode === sample.episode,
    );
    if (same.length < 2 || sample.start < 0) return null;
    const root = treeOf(block, same);
    const head = dom.make("summary", {}, `${same.length} branches of this episode`);
    return dom.make(
      "details",
      { className: "tree", open: true },
      head,
      dom.make("ul", {}, list(block, root, sample, open)),
    );
  }

  return { show };
})();
