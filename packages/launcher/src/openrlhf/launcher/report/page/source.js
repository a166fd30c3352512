"use strict";
// Where the data comes from: blocks in the page, or a server on this machine while the run goes on.
// A block is described in `report/episodes.py`.

const source = (() => {
  const live = document.documentElement.classList.contains("live");
  const READERS = {
    u1: Uint8Array,
    u2: Uint16Array,
    u4: Uint32Array,
    i4: Int32Array,
    f4: Float32Array,
    file: Uint8Array,
  };
  const kept = new Map();
  const MOST_KEPT = 8;

  async function unpack(stream) {
    const buffer = await new Response(stream.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
    const size = new DataView(buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    const columns = {};
    for (const [name, [kind, place, length]] of Object.entries(header.columns ?? {}))
      columns[name] = new READERS[kind](buffer, 4 + size + place, length);
    return { ...header, columns };
  }

  function bytesOf(id) {
    const text = atob(document.getElementById(id).textContent);
    return Uint8Array.from(text, (c) => c.charCodeAt(0));
  }

  async function block(name) {
    if (!live) return unpack(new Blob([bytesOf(name)]).stream());
    const answer = await fetch(name);
    if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
    return unpack(answer.body);
  }

  /** What the page knows of all runs, without tokens. */
  const overview = () => block("overview");

  /** The episodes of a step; the last few stay unpacked. */
  function step(run, number) {
    const name = `run-${run}-step-${number}`;
    const found = kept.get(name) ?? block(name);
    kept.delete(name);
    kept.set(name, found);
    if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
    found.catch(() => kept.delete(name));
    return found;
  }

  return { live, overview, step };
})();
