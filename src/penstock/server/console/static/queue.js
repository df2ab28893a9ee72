// One queue: its last hour, its messages, its settings, and what can be done to it.
import { bytes, count, duration, few, lineChart, make, moment, plural, trim } from "./draw.js";
import { change, follow, read } from "./server.js";
import { age, ageTitle, alertNode, ask, dialog, link, now, queueLink, rate, say, setNow } from "./parts.js";
import { Rates } from "./queues.js";
import { messageTable } from "./messages.js";
import { sendDialog } from "./send.js";
import { redriveDialog } from "./redrive.js";

const DURATIONS = { visibility_ms: 43200000, delay_ms: 31622400000, wait_ms: 86400000, retention_ms: 31622400000, priority_age_ms: 31622400000 };
// Our names, what SQS calls them, and what they mean.
export const SETTINGS = [
  ["visibility_ms", "Visibility timeout", "VisibilityTimeout", "How long a claim lasts."],
  ["retention_ms", "Retention", "MessageRetentionPeriod", "Messages older than this are removed."],
  ["delay_ms", "Delay", "DelaySeconds", "How long a new message is hidden."],
  ["wait_ms", "Wait of a pull", "ReceiveMessageWaitTimeSeconds", "How long a pull waits that finds nothing."],
  ["body_bytes_max", "Largest message", "MaximumMessageSize", "In bytes."],
  ["dead_letter", "Dead-letter queue", "RedrivePolicy.deadLetterTargetArn", "Where messages go that are pulled too often."],
  ["max_receives", "Pulls before that", "RedrivePolicy.maxReceiveCount", "Set it together with the dead-letter queue."],
  ["in_flight_max", "Most in flight", "", "Further pulls get nothing."],
  ["messages_max", "Most messages", "", "Further pushes are refused."],
  ["bytes_max", "Most bytes", "", "Further pushes are refused."],
  ["priority_age_ms", "Priority until age", "", "Older messages come before younger ones of any priority."],
  ["fifo", "FIFO", "FifoQueue", "Strict order in each group; it cannot be changed.", true],
  ["dedup_by_content", "Duplicates by content", "ContentBasedDeduplication", "Equal bodies within five minutes are one message."],
  ["dedup_per_group", "Duplicates per group", "DeduplicationScope", "FIFO queues only."],
  ["paused", "Delivery paused", "", "Pulls get nothing; everything else goes on."],
];

export function showSetting(name, value) {
  if (value === null || value === undefined) return "no limit";
  if (name in DURATIONS) return value ? duration(value) : "none";
  if (name.includes("bytes")) return bytes(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? count(value) : value;
}

function readSetting(name, text, label) {
  text = text.trim();
  if (!text || text === "none") return null;
  if (name === "dead_letter") return text;
  const found = /^([0-9]*\.?[0-9]+)\s*(ms|s|m|min|h|d|B|KiB|MiB|GiB)?$/.exec(text);
  if (!found) throw new Error(`${label}: ${text} is not a number${name in DURATIONS ? " with s, m, h or d" : ""}`);
  const unit = found[2] || (name in DURATIONS ? "s" : "B");
  const size = { ms: 1, s: 1000, m: 60000, min: 60000, h: 3600000, d: 86400000, B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824 }[unit];
  const value = Math.round(Number(found[1]) * size);
  if (value > DURATIONS[name]) throw new Error(`${label}: ${text} is more than ${duration(DURATIONS[name])}`);
  return value;
}

function editText(name, value) {
  if (value === null || value === undefined) return "";
  if (name in DURATIONS) return value % 86400000 === 0 && value ? `${value / 86400000}d` : value % 3600000 === 0 && value ? `${value / 3600000}h` : value % 60000 === 0 && value ? `${value / 60000}m` : `${value / 1000}s`;
  return String(value);
}

function settingsDialog(name, settings, done) {
  const fields = {};
  const wrong = make("p", { class: "wrong", role: "alert" });
  const rows = SETTINGS.filter(([, , , , fixed]) => !fixed).map(([key, label, sqs, what]) => {
    const isFlag = typeof settings[key] === "boolean";
    fields[key] = isFlag ? make("input", { type: "checkbox", ...(settings[key] ? { checked: "" } : {}) })
      : make("input", { value: editText(key, settings[key]), spellcheck: "false", placeholder: key === "dead_letter" || key === "max_receives" ? "none" : "no limit" });
    return make("label", { class: "setting" }, make("span", { text: label, title: what }), fields[key], make("code", { text: sqs }));
  });
  const node = dialog(`Settings of ${name}`, make("form", { class: "form", on: { async submit(event) {
    event.preventDefault();
    wrong.textContent = "";
    try {
      const changed = {};
      for (const [key, field] of Object.entries(fields)) {
        const value = field.type === "checkbox" ? field.checked : field.value.trim() === editText(key, settings[key]) ? settings[key] ?? null : readSetting(key, field.value, field.closest("label").firstChild.textContent);
        if (value !== (settings[key] ?? null)) changed[key] = value;
      }
      if (Object.keys(changed).length) {
        await change("configure-queue", { queue: name, settings: changed });
        say(`${name} is configured.`);
        done();
      }
      node.close();
    } catch (error) { wrong.textContent = error.message; }
  } } }, ...rows, wrong, make("footer", {}, make("button", { type: "button", text: "Cancel", on: { click: () => node.close() } }), make("button", { class: "primary", text: "Save" }))));
}

const LINES = [["depth", "In the queue", "s0"], ["in_flight", "In flight", "s1"]];
const RATES = [["pushed", "Pushed", "s0"], ["pulled", "Pulled", "s4"], ["deleted", "Deleted", "s2"], ["returned", "Came back", "s3"], ["dead", "Dead", "s1"]];

function tile(name, label) {
  const value = make("b", { text: "–" }), small = make("small");
  return { value, small, node: make("div", { class: `tile t-${name}` }, make("span", { text: label }), value, small) };
}

export function queuePage(main, app, name) {
  document.title = `${name} · Penstock`;
  const may = app.session.may_change;
  const tags = make("span", { class: "tags" });
  const why = make("p", { class: "why" });
  const actions = make("div", { class: "actions" });
  const head = make("header", { class: "head" }, make("p", { class: "crumbs" }, link("#/", "Queues")),
    make("div", { class: "title" }, make("span", { class: "dot" }), make("h1", { text: name }), tags), why, actions);
  const tiles = Object.fromEntries([["visible", "Visible"], ["in_flight", "In flight"], ["delayed", "Delayed"], ["oldest", "Oldest message"], ["in", "In"], ["out", "Out"], ["waiting", "Waiting pulls"], ["bytes", "Size"]].map(([key, label]) => [key, tile(key, label)]));
  const charts = make("div", { class: "charts" });
  const settings = make("section", { class: "card settings" });
  const table = messageTable(app, name);
  const lacking = make("p", { class: "lacking" });
  main.append(head, make("section", { class: "tiles", "aria-label": "Now" }, ...Object.values(tiles).map((each) => each.node)), charts,
    make("section", {}, make("h2", { text: "Messages" }), table.node), make("section", {}, make("div", { class: "section-head" }, make("h2", { text: "Settings" }), ...(may ? [make("button", { type: "button", "data-key": "e", "aria-label": "Edit the settings", text: "Edit", on: { click: () => page && settingsDialog(name, page.settings, reload) } })] : [])), settings), lacking);

  let page = null, rates = null, drawn = null, series = null, bucket = 0;
  const text = (node, value) => { if (node.textContent !== value) node.textContent = value; };

  function paint() {
    const q = page.queue, t = tiles;
    head.dataset.level = q.level;
    text(why, q.why);
    text(t.visible.value, few(q.visible));
    text(t.in_flight.value, few(q.in_flight));
    text(t.in_flight.small, q.in_flight_max && q.in_flight_max < 120000 ? `of ${few(q.in_flight_max)}` : "");
    text(t.delayed.value, few(q.delayed));
    text(t.waiting.value, few(q.waiting));
    text(t.bytes.value, q.bytes === null ? "–" : bytes(q.bytes));
    tick();
  }
  function tick() {
    if (!page) return;
    const q = page.queue, t = tiles;
    text(t.oldest.value, age(q.oldest_at_ms));
    t.oldest.value.title = ageTitle(q.oldest_at_ms);
    text(t.in.value, q.counts ? rate(rates.per(0), "0/s") : "?");
    text(t.out.value, q.counts ? rate(rates.per(2), "0/s") : "?");
    const back = q.counts ? rates.per(3) : 0;
    text(t.out.small, back ? `${rate(back)} back` : "");
    grow();
  }
  // The last bucket of the charts goes on; a new one begins every twenty seconds.
  function grow() {
    const at = Math.floor(now() / page.bucket_ms);
    const q = page.queue, depth = q.visible + q.delayed + q.in_flight;
    const passed = Math.min(page.buckets, at - bucket);
    for (let i = 0; i < passed; i += 1) for (const [key, column] of Object.entries(series)) {
      column.shift();
      column.push(key === "depth" ? depth : key === "in_flight" ? q.in_flight : 0);
    }
    bucket = Math.max(bucket, at);
    series.depth[page.buckets - 1] = depth;
    series.in_flight[page.buckets - 1] = q.in_flight;
    if (drawn && (passed || page.isNew)) for (const each of drawn) each();
    page.isNew = false;
  }
  // Of the time before the server knew the queue nothing is drawn. The bucket that goes on has a depth, and no rate.
  const known = () => Math.max(3, Math.min(page.buckets, bucket - Math.floor(page.queue.since_ms / page.bucket_ms) + 1));
  const time = (points = known(), last = bucket) => ({ from_ms: (last - points + 1) * page.bucket_ms, step_ms: page.bucket_ms, points, to_ms: (last + 1) * page.bucket_ms });
  const shown = (key) => series[key].slice(-known());
  const perSecond = (key) => series[key].slice(-known(), -1).map((n) => n * 1000 / page.bucket_ms);
  const finished = () => time(known() - 1, bucket - 1);

  function drawCharts() {
    charts.replaceChildren();
    const left = make("section", {}, make("h2", { text: "Depth" })), right = make("section", {}, make("h2", { text: "Messages a second" }));
    charts.append(left, ...(page.queue.counts ? [right] : []));
    const lines = LINES.map(([key, label, kind]) => ({ name: label, kind, values: shown(key) }));
    const depth = lineChart(left, "Depth", lines, (v, short) => short ? few(v) : count(v), false, time());
    drawn = [() => depth(LINES.map(([key]) => shown(key)), time())];
    if (!page.queue.counts) return;
    const flows = RATES.map(([key, label, kind]) => ({ name: label, kind, values: perSecond(key) }));
    const flow = lineChart(right, "Messages a second", flows, (v) => v < 10 ? trim(v) : few(v), false, finished());
    drawn.push(() => flow(RATES.map(([key]) => perSecond(key)), finished()));
  }
  function paintSettings() {
    settings.replaceChildren(make("dl", {}, ...SETTINGS.map(([key, label, sqs, what]) => make("div", { title: what },
      make("dt", { text: label }), make("dd", {}, key === "dead_letter" && page.settings[key] ? queueLink(page.settings[key]) : make("span", { text: key === "dead_letter" || key === "max_receives" ? page.settings[key] === null ? "none" : String(page.settings[key]) : showSetting(key, page.settings[key]) }), make("code", { text: sqs }))))),
    make("p", { class: "soft", text: `Created ${moment(page.created_at_ms)} UTC, configured ${moment(page.configured_at_ms)} UTC.` }));
  }
  function paintHead() {
    tags.replaceChildren(...(page.queue.fifo ? [make("span", { class: "tag", text: "FIFO" })] : []),
      ...page.sources.map((each) => make("span", { class: "tag" }, make("span", { text: "dead letters of " }), queueLink(each))),
      ...(page.queue.dead_letter ? [make("span", { class: "tag" }, make("span", { text: "dead letters go to " }), queueLink(page.queue.dead_letter))] : []));
    actions.replaceChildren();
    if (!may) return;
    const act = (label, run, kind, key) => actions.append(make("button", { type: "button", class: kind, text: label, "data-key": key, on: { click: () => Promise.resolve(run()).catch((error) => say(error.message, true)) } }));
    act("Send a message", () => sendDialog({ queue: name, fifo: page.queue.fifo }, () => table.reload()), "primary", "s");
    act(page.sources.length ? "Redrive" : "Move messages", () => redriveDialog(name, page, () => table.reload()), "", "r");
    if (!page.lacking.pause) act(page.queue.paused ? "Resume" : "Pause", async () => {
      const paused = !page.queue.paused;
      await change("configure-queue", { queue: name, settings: { paused } });
      say(paused ? `${name} is paused: pulls get nothing.` : `${name} is resumed.`);
      reload();
    }, "");
    act("Purge", async () => {
      const q = page.queue, all = q.visible + q.delayed + q.in_flight;
      if (await ask(`Purge ${name}?`, `Removes ${all ? `all ${plural(all, "message")}` : "every message"}, those in flight included. They cannot be brought back.`, "Purge", name)) {
        const done = await change("purge", { queue: name });
        say(`${name} is purged: ${plural(done.count, "message")}.`);
        table.reload();
      }
    }, "danger");
    act("Delete queue", async () => {
      if (await ask(`Delete ${name}?`, "Deletes the queue with all its messages. Pulls that wait on it fail.", "Delete queue", name)) {
        await change("delete-queue", { queue: name });
        say(`${name} is deleted.`);
        location.hash = "#/";
      }
    }, "danger");
  }
  async function load() {
    const found = await read("queue", { name });
    setNow(found.at_ms);
    page = found;
    rates = new Rates((found.series.pushed ? RATES.map(([key]) => found.series[key].slice(-3).reduce((a, b) => a + b, 0)) : null), found.queue.counts, found.at_ms);
    const q = found.queue, depth = q.visible + q.delayed + q.in_flight;
    series = {};
    for (const [key] of [...LINES, ...RATES]) {
      const flat = key === "depth" ? depth : key === "in_flight" ? q.in_flight : 0;
      series[key] = found.series[key] || new Array(page.buckets).fill(flat);
    }
    bucket = Math.floor(found.at_ms / page.bucket_ms);
    drawCharts();
    paintHead();
    paintSettings();
    paint();
    lacking.textContent = Object.entries(found.lacking).filter(([key]) => ["rates", "history", "peek", "peek pages", "by id", "oldest age", "stored bytes"].includes(key)).map(([key, reason]) => `${key}: ${reason}.`).join(" ");
    if (lacking.textContent) lacking.textContent = `This store lacks: ${lacking.textContent}`;
    if (!table.isLoaded) table.reload();
    table.note(found.queue);
    return found.at_ms;
  }
  const reload = () => load().catch((error) => say(error.message, true));
  function take(event) {
    setNow(event.at_ms);
    if ((event.gone || []).includes(name)) { tell("gone", new Error(`There is no queue ${name} any more.`)); return; }
    for (const queue of event.queues) {
      const before = page.queue.counts;
      if (queue.configured_at_ms !== page.queue.configured_at_ms) { reload(); return; }
      page.queue = queue;
      rates.add(queue.counts, event.at_ms);
      if (before && queue.counts) RATES.forEach(([key], i) => { series[key][page.buckets - 1] += Math.max(0, queue.counts[i] - before[i]); });
      page.isNew = true;
      paint();
      table.note(queue);
    }
  }
  function tell(state, error) {
    if (state === "gone") {
      stop();
      main.replaceChildren(make("p", { class: "crumbs" }, link("#/", "Queues")), alertNode(error.message));
    }
    app.tell(state, error);
  }
  const timer = setInterval(() => { if (!document.hidden) tick(); }, 1000);
  const stop = follow(name, load, take, tell);
  return () => { clearInterval(timer); stop(); table.stop(); };
}
