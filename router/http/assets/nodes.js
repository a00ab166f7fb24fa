// Elements of the page.

export const $ = (id) => document.getElementById(id);

export function made(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}
