// The first screen: every queue in a row, those that need attention first.
import { count, few, make, moment, plural } from "./draw.js";
import { change, follow, read } from "./server.js";
import { age, ageTitle, dialog, link, now, queueLink, rate, ring, setNow, sparkline } from "./parts.js";

const SHOWN_MAX = 1000;
const RATES_MS = 10000;
const SORTS = { attention: "what needs attention", name: "name", depth: "depth", age: "oldest message", rate: "rate" };
const [PUSHED, PULLED, DELETED, RETURNED] = [0, 1, 2, 3];

// How often things happen in a queue, from the counts that the page has seen.
export class Rates {
  constructor(minute, counts, at) {
    this.minute = minute;
    this.seen = counts ? [[at, counts]] : [];
    this.since = at;
  }
  add(counts, at) {
    if (!counts) return;
    const last = this.seen.at(-1);
    if (last && counts.some((each, i) => each < last[1][i])) this.seen = [];
    this.seen.push([at, counts]);
  }
  per(kind) {
    const at = now();
    while (this.seen.length > 1 && this.seen[1][0] <= at - RATES_MS) this.seen.shift();
    if (!this.seen.length) return 0;
    // Until the page has looked for some seconds, what the server counted in the last minute.
    if (at - this.since < RATES_MS / 2) return (this.minute?.[kind] ?? 0) / 60;
    const [from, first] = this.seen[0], [, last] = this.seen.at(-1);
    return (last[kind] - first[kind]) / Math.max(1, (at - Math.max(from, at - RATES_MS)) / 1000);
  }
}

function cell(name, label, ...children) {
  return make("td", { role: "cell", class: `c-${name}`, "data-label": label }, ...children);
}

class Row {
  constructor(queue, board) {
    this.board = board;
    this.line = queue.line || null;
    this.at = board.at;
    this.rates = new Rates(queue.minute, queue.counts, board.at);
    this.nodes = {
      dot: make("span", { class: "dot" }), why: make("span", { class: "why" }), tags: make("span", { class: "tags" }),
      visible: make("b"), delayed: make("small"), ring: ring(), flight: make("span"), oldest: make("span"),
      waiting: make("small"), incoming: make("span"), outgoing: make("span"), back: make("small", { class: "back" }), dead: make("span"),
    };
    const n = this.nodes;
    this.spark = sparkline(new Array(board.points).fill(0));
    this.node = make("tr", { role: "row", "data-row": "" },
      make("th", { role: "rowheader", scope: "row", class: "c-name" }, n.dot, make("span", { class: "named" }, make("span", { class: "first" }, queueLink(queue.name, { title: queue.name }), n.tags), n.why)),
      cell("depth", "Depth, last hour", this.spark),
      cell("visible", "Visible", n.visible, n.delayed),
      cell("flight", "In flight", make("span", { class: "gauge" }, n.ring, n.flight), n.waiting),
      cell("age", "Oldest", n.oldest),
      cell("rates", "In and out", make("span", { class: "pair" }, make("i", { text: "↓", "aria-label": "in", role: "img" }), n.incoming), make("span", { class: "pair" }, make("i", { text: "↑", "aria-label": "out", role: "img" }), n.outgoing), n.back),
      cell("dead", "Dead letters", n.dead));
    this.set(queue);
  }
  set(queue) {
    this.queue = queue;
    if (!this.line) this.line = new Array(this.board.points).fill(this.depth);
    if (!this.known) {
      const { points, pointMs } = this.board;
      this.known = Math.floor(now() / pointMs) - Math.floor(queue.since_ms / pointMs);
      this.line.fill(null, 0, Math.max(0, points - 1 - this.known));
      this.known = true;
    }
    this.shift();
    this.line[this.line.length - 1] = Math.max(this.isNew ? 0 : this.line.at(-1), this.depth);
    if (this.isNew) this.isNew = false;
    this.paint();
    this.spark.paint(this.line);
  }
  // The line goes on: a new point for each minute.
  shift() {
    const passed = Math.floor(now() / this.board.pointMs) - Math.floor(this.at / this.board.pointMs);
    for (let i = 0; i < Math.min(passed, this.line.length); i += 1) {
      this.line.shift();
      this.line.push(this.depth);
      this.isNew = true;
    }
    this.at = now();
    return passed > 0;
  }
  get isIdle() { return !this.line.some((each) => each); }
  get depth() { const q = this.queue; return q.visible + q.delayed + q.in_flight; }
  paint() {
    const q = this.queue, n = this.nodes, dead = q.dead_letter && this.board.rows.get(q.dead_letter);
    const text = (node, value) => { if (node.textContent !== value) node.textContent = value; };
    this.node.dataset.level = q.level;
    n.dot.title = q.why || "Nothing needs attention.";
    text(n.why, q.why);
    text(n.visible, few(q.visible));
    n.visible.title = q.visible >= 1e4 ? count(q.visible) : "";
    text(n.delayed, q.delayed ? `+ ${few(q.delayed)} delayed` : "");
    n.ring.paint(this.depth ? q.in_flight / this.depth : 0);
    text(n.flight, few(q.in_flight));
    text(n.waiting, q.waiting ? `${plural(q.waiting, "consumer")} wait${q.waiting === 1 ? "s" : ""}` : "");
    if (!n.tags.childNodes.length && q.fifo) n.tags.append(make("span", { class: "tag", text: "FIFO" }));
    const messages = dead ? dead.depth : 0;
    const key = q.dead_letter ? `${q.dead_letter} ${messages}` : "";
    if (this.deadKey !== key) {
      this.deadKey = key;
      n.dead.replaceChildren(...(q.dead_letter ? [link(`#/dead/${encodeURIComponent(q.dead_letter)}`, "", { class: messages ? "chip bad" : "chip", title: `Dead letters go to ${q.dead_letter}`, "aria-label": `${plural(messages, "dead letter")} in ${q.dead_letter}` })] : [make("span", { class: "none", text: "–", title: "No dead-letter queue" })]));
      if (q.dead_letter) n.dead.firstChild.replaceChildren(make("b", { text: few(messages) }), make("span", { text: q.dead_letter }));
    }
    this.tick();
  }
  // What changes by time alone.
  tick() {
    const q = this.queue, n = this.nodes, hasRates = !!q.counts;
    const text = (node, value) => { if (node.textContent !== value) node.textContent = value; };
    text(n.oldest, age(q.oldest_at_ms));
    n.oldest.title = ageTitle(q.oldest_at_ms);
    text(n.incoming, hasRates ? rate(this.rates.per(PUSHED)) : "?");
    text(n.outgoing, hasRates ? rate(this.rates.per(DELETED)) : "?");
    const back = hasRates ? this.rates.per(RETURNED) : 0;
    text(n.back, back ? `${rate(back)} back` : "");
  }
}

const ORDERS = {
  // Of those that need none, queues that were empty all the hour come last.
  attention: (a, b) => b.queue.level - a.queue.level || a.isIdle - b.isIdle,
  name: () => 0,
  depth: (a, b) => b.depth - a.depth,
  age: (a, b) => (a.queue.oldest_at_ms ?? Infinity) - (b.queue.oldest_at_ms ?? Infinity) || 0,
  rate: (a, b) => b.rates.per(PULLED) + b.rates.per(PUSHED) - a.rates.per(PULLED) - a.rates.per(PUSHED),
};

function verdictOf(rows, error, lostAt) {
  if (lostAt) return ["bad", "The server does not answer.", `What is shown was so at ${moment(lostAt).slice(11)} UTC. It is tried again every second.`];
  if (error) return ["bad", "The store does not answer.", error];
  if (!rows.length) return ["good", "No queues yet.", ""];
  const stuck = rows.filter((each) => each.queue.level === 2), watch = rows.filter((each) => each.queue.level === 1 && !each.isBeside);
  const dead = rows.reduce((all, each) => all + (each.isBeside ? each.depth : 0), 0);
  const some = (found) => found.slice(0, 3).map((each) => each.queue.name).join(", ") + (found.length > 3 ? ` and ${found.length - 3} more` : "");
  if (stuck.length) return ["bad", `${plural(stuck.length, "queue")} ${stuck.length === 1 ? "is" : "are"} stuck.`, some(stuck) + (watch.length ? ` · to look at: ${some(watch)}` : "") + (dead ? ` · ${plural(dead, "dead letter")}` : "")];
  if (watch.length || dead) return ["warn", "Nothing is stuck.", (watch.length ? `To look at: ${some(watch)}` : "") + (watch.length && dead ? " · " : "") + (dead ? plural(dead, "dead letter") : "")];
  return ["good", "Nothing is stuck.", `All ${plural(rows.length, "queue")} move${rows.length === 1 ? "s" : ""} or ${rows.length === 1 ? "is" : "are"} empty.`];
}

function createDialog() {
  const field = (options) => make("input", { spellcheck: "false", autocomplete: "off", autocapitalize: "none", ...options });
  const name = field({ required: "", maxlength: 80 }), dead = field({ placeholder: "none; it is created if it is new" }), most = field({ type: "number", min: 1, max: 1000, value: 5 });
  const fifo = make("input", { type: "checkbox" });
  const wrong = make("p", { class: "wrong", role: "alert" });
  const label = (text, node) => make("label", {}, make("span", { text }), node);
  const node = dialog("Create a queue", make("form", { class: "form", on: { async submit(event) {
    event.preventDefault();
    wrong.textContent = "";
    const queue = fifo.checked && !name.value.endsWith(".fifo") ? `${name.value}.fifo` : name.value;
    try {
      const letters = dead.value.trim() ? { dead_letter: dead.value.trim(), max_receives: Number(most.value) } : {};
      await change("create-queue", { queue, settings: { ...(queue.endsWith(".fifo") ? { fifo: true } : {}), ...letters } });
      node.close();
      location.hash = `#/queue/${encodeURIComponent(queue)}`;
    } catch (error) { wrong.textContent = error.message; }
  } } }, label("Name", name), make("label", { class: "check" }, fifo, make("span", { text: "FIFO: strict order in each group" })),
  make("div", { class: "columns" }, label("Dead-letter queue", dead), label("Pulls before that", most)),
  wrong, make("footer", {}, make("button", { type: "button", text: "Cancel", on: { click: () => node.close() } }), make("button", { class: "primary", text: "Create" }))));
  name.focus();
}

export function queuesPage(main, app) {
  document.title = "Queues · Penstock";
  const board = { rows: new Map(), points: 60, pointMs: 60000, at: now(), sort: "attention", search: "" };
  const verdict = make("section", { class: "verdict", "aria-live": "polite" }, make("span", { class: "dot" }), make("h1", { text: "Looking …" }), make("p"));
  const totals = make("p", { class: "totals" });
  const search = make("input", { type: "search", placeholder: "Search queues  ( / )", "aria-label": "Search queues", spellcheck: "false" });
  const sort = make("select", { "aria-label": "Sort by" }, ...Object.entries(SORTS).map(([value, text]) => make("option", { value, text })));
  const body = make("tbody", { role: "rowgroup" });
  const more = make("p", { class: "more" });
  const lacking = make("p", { class: "lacking" });
  // A column's name sorts by it, and the second time by what needs attention again.
  const heads = [["name", "Queue", "name"], ["depth", "Depth, last hour", "depth"], ["visible", "Visible"], ["flight", "In flight"], ["age", "Oldest", "age"], ["rates", "In and out", "rate"], ["dead", "Dead letters"]];
  const sorters = [];
  function headNode([name, text, by]) {
    const head = make("th", { role: "columnheader", scope: "col", class: `c-${name}` });
    if (!by) { head.textContent = text; return head; }
    head.append(make("button", { type: "button", class: "by-column", text, title: `Sort by ${SORTS[by]}`, on: { click: () => sortBy(board.sort === by ? "attention" : by) } }));
    sorters.push([head, by]);
    return head;
  }
  function sortBy(order) {
    board.sort = sort.value = order;
    for (const [head, by] of sorters) {
      if (by === order) head.setAttribute("aria-sort", by === "name" || by === "age" ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    arrange();
  }
  const table = make("table", { role: "table", class: "queues", "aria-label": "Queues" },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads.map(headNode))), body);
  main.append(verdict, make("div", { class: "find" }, search, make("label", { class: "by" }, make("span", { text: "by" }), sort), ...(app.session.may_change ? [make("button", { type: "button", "data-key": "n", text: "New queue", on: { click: createDialog } })] : []), totals), table, more, lacking);

  function arrange() {
    const all = [...board.rows.values()];
    const words = board.search.toLowerCase().split(/\s+/).filter(Boolean);
    // A dead-letter queue is beside its sources, until somebody looks for it.
    const beside = new Set(all.map((each) => each.queue.dead_letter));
    for (const each of all) each.isBeside = beside.has(each.queue.name);
    const found = all.filter((each) => words.length || board.sort !== "attention" || !each.isBeside || each.queue.level === 2).filter(({ queue }) => words.every((word) => queue.name.toLowerCase().includes(word) || queue.why.toLowerCase().includes(word)));
    found.sort((a, b) => ORDERS[board.sort](a, b) || (a.queue.name < b.queue.name ? -1 : 1));
    const shown = found.slice(0, SHOWN_MAX).map((each) => each.node);
    if (shown.length !== body.childNodes.length || shown.some((each, i) => each !== body.childNodes[i])) {
      const focused = document.activeElement;
      body.replaceChildren(...shown);
      if (body.contains(focused)) focused.focus({ preventScroll: true });
    }
    const id = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/.exec(board.search.trim());
    if (id && !found.length) more.replaceChildren(link(`#/message/-/${id[0]}`, `Look for the message ${id[0]}`));
    else more.textContent = !all.length ? "Create one here, with any SQS client, or on the command line: penstock create orders"
      : !found.length ? "No queue has this in its name. The id of a message can be searched for, too."
        : found.length > shown.length ? `${count(shown.length)} of ${count(found.length)} queues are shown; search for the others.` : "";
    table.hidden = !found.length;
  }
  function summarise() {
    const rows = [...board.rows.values()];
    const [kind, title, what] = verdictOf(rows, board.error, board.lostAt);
    verdict.dataset.kind = kind;
    const [, head, text] = verdict.children;
    if (head.textContent !== title) head.textContent = title;
    if (text.textContent !== what) text.textContent = what;
    const sum = (of) => rows.reduce((all, each) => all + of(each), 0);
    const rates = rows.some((each) => each.queue.counts)
      ? ` · ${rate(sum((each) => each.rates.per(PUSHED)), "0/s")} in, ${rate(sum((each) => each.rates.per(DELETED)), "0/s")} out` : "";
    totals.textContent = rows.length ? `${plural(rows.length, "queue")} · ${few(sum((each) => each.depth))} messages${rates}` : "";
  }
  async function load() {
    const all = await read("queues");
    setNow(all.at_ms);
    Object.assign(board, { at: all.at_ms, points: all.points, pointMs: all.point_ms, error: all.error });
    board.rows = new Map(all.queues.map((queue) => [queue.name, null]));
    for (const queue of all.queues) board.rows.set(queue.name, new Row(queue, { ...board, rows: new Map() }));
    for (const each of board.rows.values()) { each.board = board; each.paint(); }
    const names = Object.keys(all.lacking).filter((each) => ["rates", "oldest age", "stored bytes", "waiting pulls"].includes(each));
    lacking.textContent = names.length ? `This store does not tell: ${names.map((each) => `${each} (${all.lacking[each]})`).join("; ")}.` : "";
    if (all.is_partial) lacking.textContent += ` Only the first ${count(all.queues.length)} queues are read.`;
    arrange();
    summarise();
    return all.at_ms;
  }
  function take(event) {
    setNow(event.at_ms);
    board.error = event.error || "";
    let moved = false;
    for (const name of event.gone || []) moved = board.rows.delete(name) || moved;
    for (const queue of event.queues) {
      const known = board.rows.get(queue.name);
      if (known) {
        moved ||= known.queue.level !== queue.level || known.queue.dead_letter !== queue.dead_letter;
        known.rates.add(queue.counts, event.at_ms);
        known.set(queue);
      } else {
        board.at = event.at_ms;
        board.rows.set(queue.name, new Row(queue, board));
        moved = true;
      }
    }
    const dead = new Set(event.queues.map((each) => each.name));
    for (const each of board.rows.values()) if (dead.has(each.queue.dead_letter)) each.paint();
    if (moved) arrange();
    summarise();
  }
  search.addEventListener("input", () => { board.search = search.value; arrange(); });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { search.value = board.search = ""; arrange(); search.blur(); }
    else if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); (body.querySelector("a") || more.querySelector("a"))?.focus(); }
  });
  sort.addEventListener("change", () => sortBy(sort.value));
  body.addEventListener("click", (event) => {
    if (!event.target.closest("a")) event.target.closest("tr")?.querySelector("a").click();
  });
  let beats = 0;
  const timer = setInterval(() => {
    if (document.hidden) return;
    beats += 1;
    for (const each of board.rows.values()) {
      each.tick();
      if (each.shift()) each.spark.paint(each.line);
    }
    summarise();
    // A list that is sorted by a figure moves rarely, so that a row can be hit.
    if (beats % 5 === 0 && board.sort !== "attention" && board.sort !== "name") arrange();
  }, 1000);
  // What is not known any more is not called well.
  function tell(state, error) {
    board.lostAt = state === "lost" && board.rows.size ? board.lostAt || now() : 0;
    summarise();
    app.tell(state, error);
  }
  const stop = follow("", load, take, tell);
  return () => { clearInterval(timer); stop(); };
}
