// Messages in a table: pages, search, and what can be done to those that are selected. Nothing is claimed by looking.
import { bytes, count, make, moment, plural } from "./draw.js";
import { change, read } from "./server.js";
import { age, ask, link, repaint, say } from "./parts.js";
import { jsonNode } from "./json.js";

const STATES = [["visible", "Visible"], ["in_flight", "In flight"], ["delayed", "Delayed"]];
const PAGE = 50;
const PART = 500;

export const messageHash = (queue, id) => `#/message/${encodeURIComponent(queue)}/${encodeURIComponent(id)}`;

export function preview(message) {
  if (message.is_masked) return make("span", { class: "soft", text: "masked" });
  if (message.is_binary) return make("span", { class: "soft", text: `binary, ${bytes(message.bytes)}` });
  return make("code", { text: message.body || "(empty)" });
}

// A whole body: JSON is indented.
export function bodyNode(message) {
  const raw = make("pre", { class: "body", tabindex: 0, "aria-label": "Body" });
  if (message.is_masked) raw.append(make("span", { class: "soft", text: "This server masks the bodies of messages." }));
  else raw.append((!message.is_binary && jsonNode(message.body)) || document.createTextNode(message.body || "(empty)"));
  return raw;
}

// A button that shows the whole body in a row of its own below, and takes it away again.
export function bodyButton(queue, message, columns) {
  const button = make("button", { type: "button", class: "open-body", "aria-expanded": "false", on: { async click() {
    const row = button.closest("tr");
    if (row.nextElementSibling?.matches(".whole")) {
      row.nextElementSibling.remove();
      button.setAttribute("aria-expanded", "false");
      return;
    }
    try {
      const { message: whole } = await read("message", { queue, id: message.id });
      const shown = whole ? bodyNode(whole) : make("p", { class: "soft", text: "It is not in this queue any more." });
      if (!row.isConnected || row.nextElementSibling?.matches(".whole")) return;
      row.after(make("tr", { class: "whole" }, make("td", { colspan: columns }, shown)));
      button.setAttribute("aria-expanded", "true");
    } catch (error) { say(error.message, true); }
  } } }, preview(message));
  return button;
}

// Acts on many ids in parts, with a line that says how far it is; `name` is the server's action.
export async function actOn(name, queue, ids, more, show, isStopped = () => false) {
  let done = 0, left = 0;
  for (let at = 0; at < ids.length && !isStopped(); at += PART) {
    const result = await change(name, { queue, ids: ids.slice(at, at + PART), ...more });
    done += result.count;
    left += result.left;
    show?.(Math.min(ids.length, at + PART), ids.length);
  }
  return { done, left };
}

export function messageTable(app, queue, { states = STATES, actions = ["delete", "release"] } = {}) {
  const { lacks } = app.session;
  const may = app.session.may_change && !("by id" in lacks);
  const view = { state: "visible", text: "", rows: [], after: [0], hasMore: false, hasPages: true, selected: new Set(), isLoaded: false };
  let running = null;
  const tabs = make("div", { class: "choice", role: "group", "aria-label": "State" });
  const counts = {};
  for (const [state, label] of states) {
    counts[state] = make("small");
    tabs.append(make("button", { type: "button", "aria-pressed": String(state === view.state), "data-state": state, on: { click: () => choose(state) } }, make("span", { text: label }), counts[state]));
  }
  const search = make("input", { type: "search", placeholder: "Search id, body, attribute=value", "aria-label": "Search messages", spellcheck: "false" });
  if ("peek pages" in lacks) Object.assign(search, { disabled: true, placeholder: "This store cannot be searched", title: lacks["peek pages"] });
  const status = make("p", { class: "status", role: "status" });
  const acts = make("div", { class: "acts", hidden: "" });
  const picked = make("span");
  acts.append(picked);
  const all = make("input", { type: "checkbox", "aria-label": "Select all shown" });
  const body = make("tbody");
  const table = make("table", { class: "messages" }, make("thead", {}, make("tr", {}, ...(may ? [make("th", { class: "c-pick", scope: "col" }, all)] : []),
    make("th", { class: "c-id", scope: "col", text: "Id" }), make("th", { scope: "col", text: "Body" }), make("th", { class: "c-attributes", scope: "col", text: "Attributes" }), make("th", { class: "c-age", scope: "col", text: "Age" }), make("th", { class: "c-pulls", scope: "col", text: "Pulls" }))), body);
  const empty = make("p", { class: "empty" });
  const before = make("button", { type: "button", "data-key": "p", text: "Previous page" }), next = make("button", { type: "button", "data-key": "n", text: "Next page" });
  const pager = make("div", { class: "pager" }, before, next);
  const again = make("button", { type: "button", class: "quiet", "data-key": "l", text: "Load again", hidden: "" });
  const node = make("div", { class: "card table-card" }, make("div", { class: "table-head" }, tabs, search, again), status, acts, make("div", { class: "scroll" }, table), empty, pager);

  // What would change nothing in a state is not offered for it.
  const button = (label, kind, run, state = "") => acts.append(make("button", { type: "button", class: kind, text: label, "data-for": state, on: { click: run } }));
  const chosen = () => [...view.selected];
  async function perform(name, label, more = {}) {
    const ids = chosen();
    try {
      const { done, left } = await actOn(name, queue, ids, more, (at, of) => { status.textContent = `${label} ${count(at)} of ${count(of)} …`; });
      say(`${label} ${plural(done, "message")}.${left ? ` ${plural(left, "other")} could not be: another state, or gone.` : ""}`);
    } catch (error) { say(error.message, true); }
    reload();
  }
  if (actions.includes("redrive")) button("Redrive", "primary", () => perform("redrive", "Moved"), "visible");
  if (actions.includes("release")) button("Make visible now", "", async () => {
    if (view.state !== "in_flight" || await ask("Make them visible now?", "Their consumers lose the claims: other consumers may get the same messages while these still work.", "Make visible")) perform("release", "Made visible:");
  }, "in_flight delayed");
  if (actions.includes("delete")) button("Delete", "danger", async () => {
    if (await ask(`Delete ${plural(view.selected.size, "message")}?`, "They cannot be brought back.", "Delete")) perform("delete", "Deleted");
  }, "visible");
  button("Clear", "quiet", () => { view.selected.clear(); paint(); });

  const paint = () => repaint(node, paintAll);
  function paintAll() {
    body.replaceChildren(...view.rows.map((message) => {
      const box = make("input", { type: "checkbox", "aria-label": `Select ${message.id}`, ...(view.selected.has(message.id) ? { checked: "" } : {}), on: { change(event) {
        if (event.target.checked) view.selected.add(message.id); else view.selected.delete(message.id);
        paintActs();
      } } });
      const names = Object.entries(message.attributes || {});
      return make("tr", { "data-row": "", "data-id": message.id }, ...(may ? [make("td", { class: "c-pick" }, box)] : []),
        make("td", { class: "c-id" }, link(messageHash(queue, message.id), message.id.slice(-12), { title: message.id }), ...(message.group ? [make("span", { class: "tag", text: message.group, title: "group" })] : []), ...(message.priority ? [make("span", { class: "tag", text: `priority ${message.priority}` })] : [])),
        make("td", { class: "c-body" }, "peek pages" in lacks ? preview(message) : bodyButton(queue, message, may ? 6 : 5)),
        make("td", { class: "c-attributes" }, ...names.slice(0, 3).map(([key, value]) => make("span", { class: "pairs", title: typeof value === "string" ? `${key}: ${value}` : key }, make("i", { text: key }), make("span", { text: typeof value === "string" ? value : value ? "bytes" : "" }))), ...(names.length > 3 ? [make("small", { text: `+ ${names.length - 3}` })] : [])),
        make("td", { class: "c-age", text: age(message.pushed_at_ms), title: `${moment(message.pushed_at_ms)} UTC` }),
        make("td", { class: "c-pulls", text: String(message.receives) }));
    }));
    table.hidden = !view.rows.length;
    empty.hidden = !!view.rows.length;
    empty.textContent = view.text ? (running ? "" : "No message has this.") : `No messages ${view.state === "in_flight" ? "in flight" : `are ${view.state}`}.`;
    pager.hidden = !!view.text || (view.after.length < 2 && !view.hasMore);
    before.disabled = view.after.length < 2;
    next.disabled = !view.hasMore;
    paintActs();
  }
  function paintActs() {
    acts.hidden = !view.selected.size;
    for (const each of acts.querySelectorAll("[data-for]")) each.hidden = !!each.dataset.for && !each.dataset.for.includes(view.state);
    picked.textContent = `${count(view.selected.size)} selected`;
    all.checked = view.rows.length > 0 && view.rows.every((each) => view.selected.has(each.id));
  }
  async function reload() {
    running?.abort();
    running = null;
    view.isLoaded = api.isLoaded = true;
    view.selected.clear();
    again.hidden = true;
    if (view.text) { searchAll(); return; }
    await page();
  }
  async function page() {
    status.textContent = "";
    try {
      const found = await read("messages", { queue, state: view.state, after: view.after.at(-1), limit: PAGE });
      Object.assign(view, { rows: found.messages, hasMore: found.has_more, hasPages: found.has_pages });
      if (!found.has_pages && found.messages.length) status.textContent = "This store shows the first messages only.";
    } catch (error) {
      view.rows = [];
      status.textContent = error.message;
    }
    paint();
  }
  // Reads the queue part by part; what matches is shown as it is found, and typing something else ends it.
  async function searchAll() {
    running?.abort();
    const mine = running = new AbortController();
    view.rows = [];
    let searched = 0;
    paint();
    const stop = make("button", { type: "button", class: "quiet", text: "Stop", on: { click: () => mine.abort() } });
    try {
      const whole = /^[0-9a-f-]{36}$/.test(view.text) ? await read("message", { queue, id: view.text }) : {};
      if (whole.message) view.rows = [{ ...whole.message, body: (whole.message.body || "").slice(0, 400) }];
      for (let after = 0, isDone = !!whole.message; !isDone && !mine.signal.aborted;) {
        const found = await read("search", { queue, state: view.state, text: view.text, after }, mine.signal);
        ({ after, is_done: isDone } = found);
        searched += found.searched;
        view.rows.push(...found.messages);
        status.replaceChildren(make("span", { text: `${plural(view.rows.length, "message")} found in ${count(searched)}${isDone ? "." : " …"}` }), ...(isDone ? [] : [stop]));
        if (found.messages.length || isDone) paint();
        if (view.rows.length >= 1000) { status.textContent = `The first ${count(view.rows.length)} are shown, of ${count(searched)} searched.`; break; }
      }
    } catch (error) {
      if (!mine.signal.aborted) status.textContent = error.message;
    }
    if (running === mine) { running = null; paint(); }
    if (mine.signal.aborted) status.textContent = `Stopped after ${count(searched)}.`;
  }
  function choose(state) {
    view.state = state;
    view.after = [0];
    for (const each of tabs.children) each.setAttribute("aria-pressed", String(each.dataset.state === state));
    reload();
  }
  let typing = 0;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => { view.text = search.value.trim(); view.after = [0]; reload(); }, 250);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { search.value = ""; search.blur(); if (view.text) { view.text = ""; reload(); } }
  });
  all.addEventListener("change", () => {
    for (const each of view.rows) if (all.checked) view.selected.add(each.id); else view.selected.delete(each.id);
    paint();
  });
  before.addEventListener("click", () => { view.after.pop(); page(); });
  next.addEventListener("click", () => { view.after.push(view.rows.at(-1).sequence); page(); });
  again.addEventListener("click", reload);
  const api = {
    node, reload, isLoaded: false,
    stop: () => { running?.abort(); clearTimeout(typing); },
    ids: () => view.rows.map((each) => each.id),
    // The queue has changed: its counts are shown, and the table is read again when the user asks for it.
    note(counted) {
      for (const [state] of states) counts[state].textContent = counted[state] ? ` ${count(counted[state])}` : "";
      const now = `${counted.visible} ${counted.in_flight} ${counted.delayed}`;
      if (api.seen !== undefined && api.seen !== now) {
        if (!view.rows.length && !view.text && !running && counted[view.state]) reload();
        else again.hidden = false;
      }
      api.seen = now;
    },
  };
  return api;
}
