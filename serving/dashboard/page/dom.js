// Creates elements. Data only becomes text or a number in an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element; attributes that are null, undefined or false are left out. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets a text only if it differs, so that nothing is announced or deselected without need. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A text for screen readers only. */
export function unseen(text) {
  return el("span", { class: "unseen" }, text);
}

/** A dash that screen readers read as "not known". */
export function unknown() {
  return el("span", { class: "unknown" }, el("span", { "aria-hidden": "true" }, "–"), unseen("not known"));
}

/** Updates the children of `parent` by key, so that focus, selection and opened details survive an update. */
export function keyed(parent, items, { key, make, update }) {
  const known = (parent.keyedChildren ??= new Map());
  const wanted = new Set();
  items.forEach((item, index) => {
    let name = String(key(item, index));
    while (wanted.has(name)) name += "'";
    wanted.add(name);
    let node = known.get(name);
    if (!node) known.set(name, (node = make(item)));
    update(node, item);
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  for (const [name, node] of known) {
    if (!wanted.has(name)) {
      known.delete(name);
      node.remove();
    }
  }
}
