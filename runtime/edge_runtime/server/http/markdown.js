"use strict";
// Renders Markdown as elements, never as HTML text. The position of each character in the source is tracked, to mark accepted drafts.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/, HEADING = /^(#{1,6})\s+(.*)$/, RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/, QUOTE = /^ {0,3}> ?/, ROW = /^\s*\|.*\|\s*$/, DIVIDER = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;
const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(?=\S)(.+?\S?)\*\*|__(?=\S)(.+?)__(?!\w)|\*(?=[^\s*])([^*]+?)\*|(?<!\w)_(?=\S)([^_]+?)_(?!\w)|\[([^\]\n]{1,300})\]\(([^\s)]+)\)/;
// The patterns take quadratic time in a line's length, so a longer line is shown as plain text.
const LONGEST_LINE = 2000;
const SAFE_LINK = /^(https?:|mailto:)/i;

function element(parent, tag, name = "") {
  const made = parent.appendChild(document.createElement(tag));
  if (name) made.className = name;
  return made;
}

// `drafted[i]` is 1 if character i of the source comes from an accepted draft.
function markdown(parent, source, drafted = []) {
  parent.replaceChildren();
  const lines = [];
  let at = 0;
  for (const text of source.split("\n")) {
    lines.push({ text, at });
    at += text.length + 1;
  }
  blocks(parent, lines, drafted);
}

function plain(parent, text, at, drafted) {
  let from = 0;
  for (let i = 1; i <= text.length; i++) {
    if (i < text.length && !drafted[at + i] === !drafted[at + from]) continue;
    const piece = text.slice(from, i);
    if (drafted[at + from]) element(parent, "mark").textContent = piece;
    else parent.append(piece);
    from = i;
  }
}

function inline(parent, text, at, drafted, depth = 0) {
  for (;;) {
    const found = depth < 8 ? INLINE.exec(text) : null;
    if (!found) return plain(parent, text, at, drafted);
    plain(parent, text.slice(0, found.index), at, drafted);
    const start = at + found.index, [whole, ticks, code, strong, strong2, em, em2, label, target] = found;
    if (ticks) plain(element(parent, "code"), code, start + ticks.length, drafted);
    else if (strong ?? strong2) inline(element(parent, "strong"), strong ?? strong2, start + 2, drafted, depth + 1);
    else if (em ?? em2) inline(element(parent, "em"), em ?? em2, start + 1, drafted, depth + 1);
    else if (SAFE_LINK.test(target)) {
      const link = element(parent, "a");
      link.setAttribute("href", target);
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      inline(link, label, start + 1, drafted, depth + 1);
    } else plain(parent, whole, start, drafted);
    text = text.slice(found.index + whole.length);
    at = start + whole.length;
  }
}

function blocks(parent, lines, drafted, depth = 0) {
  for (let i = 0; i < lines.length;) {
    const { text, at } = lines[i];
    if (text.length > LONGEST_LINE) {
      plain(element(parent, "p"), text, at, drafted);
      i++;
      continue;
    }
    const fence = fenceOf(text), heading = HEADING.exec(text);
    if (!text.trim()) i++;
    else if (fence) i = codeBlock(parent, lines, i, fence, drafted);
    else if (heading) {
      inline(element(parent, `h${Math.min(4, heading[1].length + 1)}`), heading[2], at + text.length - heading[2].length, drafted);
      i++;
    } else if (RULE.test(text)) {
      element(parent, "hr");
      i++;
    } else if (QUOTE.test(text) && depth < 8) {
      const from = i;
      while (i < lines.length && QUOTE.test(lines[i].text)) i++;
      blocks(element(parent, "blockquote"), lines.slice(from, i).map((line) => cut(line, QUOTE.exec(line.text)[0].length)), drafted, depth + 1);
    } else if (ITEM.test(text) && depth < 8) i = list(parent, lines, i, drafted, depth);
    else if (ROW.test(text) && DIVIDER.test(lines[i + 1]?.text ?? "")) i = table(parent, lines, i, drafted);
    else i = paragraph(parent, lines, i, drafted);
  }
}

const fenceOf = (text) => text.length > LONGEST_LINE ? null : FENCE.exec(text);
const cut = ({ text, at }, size) => ({ text: text.slice(size), at: at + Math.min(size, text.length) });
const begins = (text) => text.length > LONGEST_LINE || !text.trim() || fenceOf(text) || HEADING.test(text) || QUOTE.test(text) || ITEM.test(text) || RULE.test(text);

function paragraph(parent, lines, i, drafted) {
  const made = element(parent, "p"), from = i;
  do {
    if (i > from) element(made, "br");
    inline(made, lines[i].text, lines[i].at, drafted);
    i++;
  } while (i < lines.length && !begins(lines[i].text));
  return i;
}

function codeBlock(parent, lines, i, fence, drafted) {
  const figure = element(parent, "figure"), caption = element(figure, "figcaption");
  element(caption, "span").textContent = fence[2].trim() || "code";
  const copy = element(caption, "button", "copy"), code = element(element(figure, "pre"), "code");
  copy.type = "button";
  copy.textContent = "Copy";
  const first = ++i;
  for (; i < lines.length; i++) {
    const end = fenceOf(lines[i].text);
    if (end?.[1].startsWith(fence[1]) && !end[2]) break;
    if (i > first) code.append("\n");
    plain(code, lines[i].text, lines[i].at, drafted);
  }
  return i + 1;
}

function list(parent, lines, i, drafted, depth) {
  const marker = ITEM.exec(lines[i].text), ordered = /\d/.test(marker[2]), indent = marker[1].length;
  const made = element(parent, ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(marker[2], 10);
  while (i < lines.length) {
    const item = ITEM.exec(lines[i].text);
    if (!item || item[1].length < indent || /\d/.test(item[2]) !== ordered) break;
    const inner = [cut(lines[i++], item[0].length)];
    for (; i < lines.length; i++) {
      const { text } = lines[i], next = ITEM.exec(text), deeper = text.search(/\S/) > indent;
      if (next ? next[1].length <= indent : text.trim() ? !deeper : !(lines[i + 1]?.text.search(/\S/) > indent)) break;
      inner.push(cut(lines[i], Math.min(item[0].length, Math.max(0, text.search(/\S|$/)))));
    }
    const body = element(made, "li"), plainLines = inner.findIndex((line, n) => n && begins(line.text));
    const own = plainLines < 0 ? inner : inner.slice(0, plainLines);
    own.forEach((line, n) => { if (n) body.append(" "); inline(body, line.text, line.at, drafted); });
    if (plainLines > 0) blocks(body, inner.slice(plainLines), drafted, depth + 1);
    while (i < lines.length && !lines[i].text.trim() && ITEM.test(lines[i + 1]?.text ?? "")) i++;
  }
  return i;
}

function table(parent, lines, i, drafted) {
  const made = element(element(parent, "div", "table"), "table");
  for (let n = 0; i < lines.length && lines[i].text.length <= LONGEST_LINE && ROW.test(lines[i].text); n++, i++) {
    if (n === 1) continue;
    const row = element(made, "tr"), inner = lines[i].text.trim().slice(1, -1);
    let at = lines[i].at + lines[i].text.indexOf("|") + 1;
    for (const cell of inner.split("|")) {
      const lead = cell.search(/\S|$/);
      inline(element(row, n ? "td" : "th"), cell.trim(), at + lead, drafted);
      at += cell.length + 1;
    }
  }
  return i;
}
