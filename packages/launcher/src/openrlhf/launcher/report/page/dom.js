"use strict";
// Elements from texts. Text of a model is only ever put in as text, with what would hide or reorder it made visible.

const dom = (() => {
  /** Control characters, bidirectional overrides, invisible characters and halves of surrogate pairs. */
  const HIDDEN =
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Surrogate}/gu;

  /** The text with every hidden character by its number. */
  function visible(text) {
    return String(text).replace(HIDDEN, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
  }

  /** An element. properties: of the element; those that start with "data-" or "aria-" and "role" are attributes. */
  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name.includes("-") || name === "role") element.setAttribute(name, value);
      else element[name] = value;
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  }

  /** A text element whose text comes from a run. */
  const text = (tag, value, properties = {}) => make(tag, properties, visible(value));

  /** A number to four digits, as short as it can be said. */
  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  /** A table with a header row. rows: lists of texts or elements. */
  function table(head, rows) {
    const cell = (tag) => (value) => (value instanceof Node ? make(tag, {}, value) : text(tag, value));
    return make(
      "div",
      { className: "scroll" },
      make(
        "table",
        {},
        make("thead", {}, make("tr", {}, head.map(cell("th")))),
        make(
          "tbody",
          {},
          rows.map((row) => make("tr", {}, row.map(cell("td")))),
        ),
      ),
    );
  }

  const probe = document.documentElement.appendChild(make("i", { hidden: true }));

  /** A colour of the style sheet, as a canvas understands it. */
  function colour(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }

  const find = (id) => document.getElementById(id);
  const choice = (id) => /** @type {HTMLSelectElement | null} */ (find(id));

  /** A section without what was put in before; its heading stays. */
  function section(id) {
    const element = find(id);
    element.replaceChildren(element.firstElementChild);
    return element;
  }

  return { visible, make, text, number, table, colour, find, choice, section };
})();
