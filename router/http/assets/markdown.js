// A model's text as nodes: fenced code, headings, lists, `code` and **strong** words. Everything else stays as the
// model wrote it. What it wrote only ever becomes the text of a node, never HTML.

import { made } from "./nodes.js";

const FENCE = /^\s*```/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const MAX_DEPTH = 8; // of lists in lists

export function markdown(text, depth = 0) {
  const lines = text.split("\n");
  const node = document.createDocumentFragment();
  while (lines.length) {
    if (!lines[0].trim()) lines.shift();
    else if (FENCE.test(lines[0])) node.append(code(lines));
    else if (HEADING.test(lines[0])) node.append(heading(lines.shift()));
    else if (ITEM.test(lines[0]) && depth < MAX_DEPTH) node.append(list(lines, depth));
    else node.append(paragraph(lines));
  }
  return node;
}

// Each of these takes its lines from the front.

function code(lines) {
  lines.shift();
  const end = lines.findIndex((line) => FENCE.test(line));
  const inside = lines.splice(0, end < 0 ? lines.length : end);
  lines.shift();
  return made("pre", "", made("code", "", inside.join("\n")));
}

// The page's own headings go down to the third level.
function heading(line) {
  const [, marks, words] = HEADING.exec(line);
  return made(`h${Math.min(6, 3 + marks.length)}`, "", inline(words));
}

function paragraph(lines) {
  const own = [lines.shift()];
  while (lines.length && !endsParagraph(lines[0])) own.push(lines.shift());
  return made("p", "", inline(own.join("\n")));
}

// A number other than 1 at the start of a line is more often a year than a list.
function endsParagraph(line) {
  const mark = ITEM.exec(line)?.[2];
  return !line.trim() || FENCE.test(line) || HEADING.test(line) || (mark && (!isNumber(mark) || parseInt(mark) === 1));
}

function list(lines, depth) {
  const mark = ITEM.exec(lines[0])[2];
  const node = made(isNumber(mark) ? "ol" : "ul", "");
  if (isNumber(mark)) node.start = parseInt(mark);
  for (let found; (found = ITEM.exec(lines[0] ?? "")) && isNumber(found[2]) === isNumber(mark); skipBlank(lines)) {
    const [all, indent, , words] = found;
    lines.shift();
    const inside = [words, ...indented(lines, indent.length, all.length - words.length)];
    node.append(made("li", "", markdown(inside.join("\n"), depth + 1)));
  }
  return node;
}

const isNumber = (mark) => mark.length > 1;

// The lines of an item that begins at `indent` and has its words at `column`.
function indented(lines, indent, column) {
  const found = [];
  for (;;) {
    const next = lines.findIndex((line) => line.trim());
    if (next < 0 || lines[next].search(/\S/) <= indent) return found;
    found.push(...lines.splice(0, next + 1).map((line) => line.slice(Math.min(column, Math.max(0, line.search(/\S/))))));
  }
}

// Blank lines between two items.
function skipBlank(lines) {
  const next = lines.findIndex((line) => line.trim());
  if (next > 0 && ITEM.test(lines[next])) lines.splice(0, next);
}

function inline(text) {
  const node = document.createDocumentFragment();
  for (const piece of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (piece.length > 2 && piece.startsWith("`") && piece.endsWith("`")) node.append(made("code", "", piece.slice(1, -1)));
    else if (piece.length > 4 && piece.startsWith("**") && piece.endsWith("**")) node.append(made("strong", "", piece.slice(2, -2)));
    else node.append(piece);
  }
  return node;
}
