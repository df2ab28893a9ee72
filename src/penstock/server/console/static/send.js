// Sends a message: a new one, or one that is edited and sent again.
import { make } from "./draw.js";
import { change } from "./server.js";
import { dialog, say } from "./parts.js";

const DELAY_MS_MAX = 31622400000;
const durationMs = (text) => {
  const found = /^([0-9]*\.?[0-9]+)\s*(ms|s|m|h|d)?$/.exec(text.trim());
  if (!found) throw new Error(`${text} is not a duration; use 30, 1.5, 30s, 5m or 2h`);
  const value = Math.round(Number(found[1]) * { ms: 1, s: 1000, m: 60000, h: 3600000, d: 86400000 }[found[2] || "s"]);
  if (value > DELAY_MS_MAX) throw new Error(`Delay: ${text} is more than 366 d`);
  return value;
};

// What a message was sent with, to be edited and sent again to where it came from.
export function sendAgain(message, done) {
  const queue = message.source || message.queue;
  sendDialog({ queue, fifo: queue.endsWith(".fifo"), body: message.body, attributes: message.attributes, group: message.group || "", priority: message.priority, title: `Send again to ${queue}` }, done);
}

export function sendDialog({ queue, fifo, body = "", attributes = {}, group = "", priority = 0, title }, done) {
  const field = (options) => make("input", { spellcheck: "false", autocomplete: "off", ...options });
  const text = make("textarea", { rows: 9, spellcheck: "false", "aria-label": "Body" });
  text.value = body;
  const hint = make("small", { class: "soft" });
  const delay = field({ placeholder: "the queue's own" }), groupField = field({ value: group }), dedup = field({}), level = field({ type: "number", min: 0, max: 9, value: priority });
  const pairs = make("div", { class: "pairs-edit" });
  const addPair = (name = "", value = "") => {
    const row = make("div", {}, field({ placeholder: "name", value: name, "aria-label": "Attribute name" }), field({ placeholder: "value", value, "aria-label": "Attribute value" }), make("button", { type: "button", class: "icon", "aria-label": "Remove the attribute", text: "✕", on: { click: () => row.remove() } }));
    pairs.append(row);
  };
  for (const [name, value] of Object.entries(attributes)) if (typeof value === "string") addPair(name, value);
  const check = () => {
    const trimmed = text.value.trim();
    if (!/^[[{]/.test(trimmed)) { hint.textContent = ""; return; }
    try { JSON.parse(trimmed); hint.textContent = "JSON"; } catch (error) { hint.textContent = `Not JSON: ${error.message}`; }
  };
  text.addEventListener("input", check);
  check();
  const wrong = make("p", { class: "wrong", role: "alert" });
  const label = (name, node) => make("label", {}, make("span", { text: name }), node);
  const node = dialog(title || `Send to ${queue}`, make("form", { class: "form", on: { async submit(event) {
    event.preventDefault();
    wrong.textContent = "";
    try {
      const given = Object.fromEntries([...pairs.children].map((row) => [...row.querySelectorAll("input")].map((each) => each.value)).filter(([name]) => name));
      const sent = await change("send", { queue, body: text.value, attributes: given, delay_ms: delay.value.trim() ? durationMs(delay.value) : null, group: groupField.value, dedup_id: dedup.value, priority: Number(level.value) || 0 });
      say(sent.is_duplicate ? "A message with this dedup id was there already." : "The message is sent.");
      node.close();
      done?.(sent);
    } catch (error) { wrong.textContent = error.message; }
  } } }, label("Body", text), hint, make("div", {}, make("span", { class: "label", text: "Attributes" }), pairs, make("button", { type: "button", class: "quiet", text: "+ Attribute", on: { click: () => addPair() } })),
  make("div", { class: "columns" }, label("Delay", delay), label(fifo ? "Group (needed)" : "Group", groupField), label(fifo ? "Dedup id (or by content)" : "Dedup id", dedup), label("Priority", level)),
  wrong, make("footer", {}, make("button", { type: "button", text: "Cancel", on: { click: () => node.close() } }), make("button", { class: "primary", text: "Send" }))));
  text.focus();
}
