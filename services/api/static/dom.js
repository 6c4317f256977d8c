/** Elements made from data. Text from a run becomes text nodes and never markup. */

const SVG = 'http://www.w3.org/2000/svg';

/** The element of the page with this id. */
export const at = id => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? '' : String(value));
    }
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

/** An HTML element: make('p', {class: 'quiet'}, 'text', otherNode). */
export const make = (name, attributes, ...children) =>
  fill(document.createElement(name), attributes, children);

/** The same for SVG. */
export const draw = (name, attributes, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

/** Change the text of an element only if it differs, so that no reader is told twice. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Put children in the place of those of an element, unless they are the same: what somebody has
 * selected or pointed at stays. */
export function place(node, ...children) {
  const fresh = node.cloneNode(false);
  fresh.append(...children.filter(child => child !== null && child !== undefined));
  if (!node.isEqualNode(fresh)) node.replaceChildren(...fresh.childNodes);
}
