// JSON for people: parsed, indented, and coloured by kind; every part of it is text.
import { make } from "./draw.js";

const SIZE_MAX = 200000;

export function jsonNode(text) {
  if (text.length > SIZE_MAX || !/^\s*[[{]/.test(text)) return null;
  let shown;
  // Numbers are shown as they were written: parsing would change large ones.
  try { JSON.parse(text); shown = indent(text); } catch { return null; }
  return make("code", { class: "json" }, ...shown);
}

const TOKEN = /("(?:[^"\\]|\\.)*")(\s*:)?|(-?[0-9][0-9.eE+-]*)|(true|false|null)|([[\]{},])|\s+/g;

function indent(text) {
  const parts = [];
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  const found = [...text.matchAll(TOKEN)].filter((each) => each[1] || each[3] || each[4] || each[5]);
  found.forEach(([, string, colon, number, word, mark], i) => {
    if (string) parts.push(make("span", { class: colon ? "key" : "string", text: string }), colon ? ": " : "");
    else if (number) parts.push(make("span", { class: "number", text: number }));
    else if (word) parts.push(make("span", { class: "word", text: word }));
    else if (mark === "{" || mark === "[") {
      const isEmpty = /[}\]]/.test(found[i + 1]?.[5] || "");
      depth += 1;
      parts.push(mark, isEmpty ? "" : line());
    } else if (mark === ",") parts.push(mark, line());
    else {
      const isEmpty = /[[{]/.test(found[i - 1]?.[5] || "");
      depth -= 1;
      parts.push(isEmpty ? "" : line(), mark);
    }
  });
  return parts.filter((each) => each !== "");
}
