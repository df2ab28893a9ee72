// Moves the messages of a queue, in parts: it shows how far it is, and can be stopped.
import { count, make, plural } from "./draw.js";
import { change } from "./server.js";
import { dialog, say } from "./parts.js";

export function redriveDialog(queue, page, done) {
  const all = page.queue.visible;
  const to = make("input", { placeholder: page.sources.length ? "where they came from" : "name of a queue", spellcheck: "false" });
  const bar = make("progress", { max: Math.max(1, all), value: 0 }), status = make("p", { class: "soft", role: "status", text: `${plural(all, "visible message")} to move.` });
  const wrong = make("p", { class: "wrong", role: "alert" });
  const go = make("button", { class: "primary", text: "Move all" }), close = make("button", { type: "button", text: "Cancel" });
  let isRunning = false, isStopped = false;
  const node = dialog(page.sources.length ? `Redrive ${queue}` : `Move messages of ${queue}`, make("form", { class: "form", on: { async submit(event) {
    event.preventDefault();
    if (isRunning) return;
    isRunning = true;
    go.disabled = true;
    close.textContent = "Stop";
    wrong.textContent = "";
    let moved = 0;
    try {
      for (let isDone = false; !isDone && !isStopped && moved < all;) {
        const part = await change("redrive", { queue, to: to.value.trim() || null });
        moved += part.count;
        isDone = part.is_done;
        bar.value = Math.min(moved, all);
        status.textContent = `${count(moved)} of ${plural(all, "message")} moved.`;
      }
      say(`${plural(moved, "message")} of ${queue} moved${isStopped ? ", then stopped" : ""}.`);
      node.close();
      done?.();
    } catch (error) {
      wrong.textContent = error.message;
      isRunning = isStopped = false;
      go.disabled = false;
      close.textContent = "Close";
    }
  } } }, make("label", {}, make("span", { text: "To" }), to), bar, status, wrong, make("footer", {}, close, go)));
  close.addEventListener("click", () => { if (isRunning) isStopped = true; else node.close(); });
  node.addEventListener("close", () => { isStopped = true; });
  return node;
}
