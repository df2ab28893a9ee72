// Small parts that several pages of the console are made of.
import { about, count, draw, duration, few, make, moment, trim } from "./draw.js";

export const link = (href, text, options = {}) => make("a", { href, text, ...options });
export const queueLink = (name, options) => link(`#/queue/${encodeURIComponent(name)}`, name, options);
export const alertNode = (text) => make("p", { class: "notice", role: "alert", text });

// The time of the server: a browser's clock may be wrong.
let ahead = 0;
export const setNow = (at) => { ahead = at - Date.now(); };
export const now = () => Date.now() + ahead;
export const age = (at) => at === null || at === undefined ? "–" : about(Math.max(0, now() - at));
export const ageTitle = (at) => at === null || at === undefined ? "" : `since ${moment(at)} UTC`;

export function rate(each, none = "–") {
  if (!each) return none;
  if (each >= 0.95) return `${each < 10 ? trim(each) : few(each)}/s`;
  return each * 60 >= 0.95 ? `${trim(each * 60)}/min` : "<1/min";
}

// A line of the last hour, without axes; null is a time of which nothing is known.
export function sparkline(values, { width = 132, height = 30 } = {}) {
  const root = draw("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, preserveAspectRatio: "none", "aria-hidden": "true" });
  const area = draw("path", { class: "area s0" }), curve = draw("path", { class: "curve s0" });
  root.append(draw("line", { class: "grid", x1: 1, x2: width - 1, y1: height - 1, y2: height - 1 }), area, curve);
  root.paint = (shown) => {
    const most = Math.max(...shown, 1);
    const x = (i) => (1 + (width - 2) * i / (shown.length - 1)).toFixed(1);
    const y = (v) => (height - 2 - (height - 5) * v / most).toFixed(1);
    const first = Math.min(shown.findIndex((v) => v !== null), shown.length - 2);
    const path = shown.slice(first).map((v, i) => `${x(first + i)} ${y(v ?? shown.at(-1))}`).join("L");
    curve.setAttribute("d", `M${path}`);
    area.setAttribute("d", `M${x(first)} ${height - 1}L${path}L${width - 1} ${height - 1}Z`);
  };
  root.paint(values);
  return root;
}

// How much of a queue is in flight: a ring that is full when consumers hold everything.
const ROUND = 2 * Math.PI * 9;
export function ring() {
  const part = draw("circle", { class: "ring-part", cx: 12, cy: 12, r: 9, "stroke-dasharray": `0 ${ROUND}`, transform: "rotate(-90 12 12)" });
  const root = draw("svg", { class: "ring", viewBox: "0 0 24 24", width: 24, height: 24, "aria-hidden": "true" },
    draw("circle", { class: "ring-track", cx: 12, cy: 12, r: 9 }), part);
  root.paint = (share) => part.setAttribute("stroke-dasharray", `${(share ? Math.max(0.04, share) * ROUND : 0).toFixed(2)} ${ROUND}`);
  return root;
}

export const plainCount = (n) => make("span", { text: few(n), title: n >= 1e4 ? count(n) : undefined });
export { duration };

// A dialog with these contents; it is removed when it is closed.
export function dialog(title, ...children) {
  const node = make("dialog", { "aria-label": title },
    make("header", {}, make("h2", { text: title }), make("button", { type: "button", class: "icon", "aria-label": "Close", text: "✕", on: { click: () => node.close() } })),
    make("div", { class: "dialog-body" }, ...children));
  node.addEventListener("close", () => node.remove());
  // Beside a form one may press by mistake: what was typed stays.
  node.addEventListener("click", (event) => { if (event.target === node && !node.querySelector("form")) node.close(); });
  document.body.append(node);
  node.showModal();
  node.querySelector("form :is(input, textarea)")?.focus();
  return node;
}

const FOCUSED = "a, button, summary, input";
// Paints anew, and leaves the focus where it was: on the same thing of what has the same `data-id`.
export function repaint(root, paint) {
  const held = document.activeElement;
  const row = root.contains(held) ? held.closest("[data-id]") : null;
  const at = row ? [...row.querySelectorAll(FOCUSED)].indexOf(held) : -1;
  paint();
  if (!row || root.contains(held)) return;
  const again = root.querySelector(`[data-id="${CSS.escape(row.dataset.id)}"]`);
  (at < 0 ? again : again?.querySelectorAll(FOCUSED)[at])?.focus({ preventScroll: true });
}

let toasts;
// Says what was done, or what failed, in a corner for some seconds.
export function say(text, isBad) {
  toasts ??= document.body.appendChild(make("div", { class: "toasts", role: "status", "aria-live": "polite" }));
  const node = make("p", { class: isBad ? "toast bad" : "toast", text });
  toasts.append(node);
  setTimeout(() => node.remove(), isBad ? 10000 : 5000);
}

// Asks before something that cannot be undone; with `name`, that has to be typed.
export function ask(title, text, label, name) {
  return new Promise((answer) => {
    let isSure = false;
    const go = make("button", { class: "danger primary", text: label, ...(name ? { disabled: "" } : {}) });
    const field = name ? make("input", { spellcheck: "false", autocomplete: "off", "aria-label": `Type ${name}`, on: { input: () => { go.disabled = field.value !== name; } } }) : null;
    const node = dialog(title, make("form", { class: "form", on: { submit(event) { event.preventDefault(); isSure = true; node.close(); } } },
      make("p", { text }), ...(field ? [make("label", {}, make("span", { text: `Type ${name} to go on` }), field)] : []),
      make("footer", {}, make("button", { type: "button", text: "Cancel", on: { click: () => node.close() } }), go)));
    node.addEventListener("close", () => answer(isSure));
    (field || go).focus();
  });
}
