// Draws the report from the JSON that stands before this script, with what `drawing/draw.js` exports, which
// is put before it. Text from the lake reaches the page only through `textContent` and attributes that hold
// no code.
const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const QUANTILES = [["p50_ms", "p50"], ["p90_ms", "p90"], ["p99_ms", "p99"], ["p999_ms", "p99.9"]];
function latencyTable(node, rows) {
  const head = make("tr", {}, make("th", { text: "queue", scope: "col" }), make("th", { text: "samples", scope: "col" }),
    make("th", { class: "strip", scope: "col" }), ...QUANTILES.map(([, name]) => make("th", { text: name, scope: "col" })),
    make("th", { text: "longest", scope: "col" }));
  const positions = (ms) => Math.log10(Math.max(1, ms));
  const least = Math.min(...rows.map((r) => positions(r.p50_ms))), most = Math.max(...rows.map((r) => positions(r.p999_ms)));
  const x = (ms) => 3 + 94 * (positions(ms) - least) / Math.max(0.3, most - least);
  const body = rows.map((row) => {
    const strip = draw("svg", { height: 16, role: "img", "aria-label": "p50 to p99.9 on a scale of powers of ten" },
      draw("line", { class: "range", x1: x(row.p50_ms) + "%", x2: x(row.p999_ms) + "%", y1: 8, y2: 8 }),
      ...QUANTILES.map(([key], i) => draw("circle", { class: `p${i}`, cx: x(row[key]) + "%", cy: 8, r: 4 })).reverse());
    strip.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, make("b", { text: row.queue }),
      ...QUANTILES.map(([key, name]) => tipLine("", name, duration(row[key])))));
    strip.addEventListener("pointerleave", hideTip);
    return make("tr", {}, make("td", { text: row.queue, title: row.queue }), make("td", { text: count(row.samples) }),
      make("td", { class: "strip" }, strip), ...QUANTILES.map(([key]) => make("td", { text: duration(row[key]) })),
      make("td", { text: duration(row.max_ms) }));
  });
  node.append(make("div", { class: "card scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))));
}

const MEASURES = {
  "wait": "From when a message could be pulled until it first was.",
  "hold": "From a claim to its end: deleted, released or timed out.",
  "end to end": "From a message's push until it was deleted.",
};
function showMeasure(name) {
  for (const button of by("measures").children) button.setAttribute("aria-pressed", String(button.textContent === name));
  by("measure-about").textContent = MEASURES[name];
  const node = by("latency");
  node.replaceChildren();
  const found = data.latency[name];
  histogram(node, found.bins, found.samples);
  if (found.queues.length) {
    const below = make("div");
    below.style.marginTop = ".8rem";
    node.append(below);
    latencyTable(below, found.queues);
    if (found.more) node.append(make("p", { class: "more", text: `and ${count(found.more)} more` }));
  }
}

// Bars made of parts: each row has a name, its parts by the order of `kinds`, and what to write behind them.
function bars(title, kinds, rows, more) {
  const most = Math.max(1, ...rows.map((row) => row.parts.reduce((a, b) => a + b, 0)));
  const card = make("div", { class: "card" }, make("h3", { text: title }));
  if (!rows.length) { card.append(make("p", { class: "empty", text: "None." })); return card; }
  if (kinds.length > 1) card.append(make("div", { class: "key" }, ...kinds.map(([kind, name]) =>
    make("span", {}, make("i", { class: `swatch ${kind}` }), make("span", { text: name })))));
  rows.forEach((row) => {
    const track = make("div", { class: "track" });
    row.parts.forEach((n, i) => {
      if (!n) return;
      const part = make("span", { class: `part ${kinds[i][0]}` });
      part.style.width = `max(2px, ${100 * n / most}%)`;
      track.append(part);
    });
    const line = make("div", { class: "row" }, make("span", { text: row.name, title: row.name }), track,
      make("span", { text: row.said }));
    line.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, make("b", { text: row.name }),
      ...kinds.map(([kind, name], i) => tipLine(kind, name, count(row.parts[i])))));
    line.addEventListener("pointerleave", hideTip);
    card.append(line);
  });
  if (more) card.append(make("p", { class: "more", text: `and ${count(more)} more` }));
  return card;
}

function verdict() {
  const { holds, events, checks, findings } = data.audit;
  const failed = checks.filter((each) => each.findings);
  const total = failed.reduce((sum, each) => sum + each.findings, 0);
  const card = make("div", { class: holds ? "card" : "card bad" },
    make("strong", { text: holds ? "Every check holds" : `${failed.length} of ${checks.length} checks failed` }),
    make("p", { text: holds ? `${plural(checks.length, "check")} over ${plural(events, "event")}.`
      : `${plural(total, "finding")} in ${plural(events, "event")}.` }));
  findings.forEach((each) => {
    const about = each.message_id || each.queue || each.store;
    const line = make("div", { class: "finding" }, make("b", { text: each.check }), " ",
      make("code", { text: about }), make("p", { text: `Entry ${count(each.entry)}: ${each.detail}` }));
    if (each.events.length) line.append(make("details", {}, make("summary", { text: plural(each.events.length, "event") }),
      make("pre", { text: each.events.join("\n") })));
    card.append(line);
  });
  if (total > findings.length && !holds) card.append(make("p", { class: "more", text: `and ${count(total - findings.length)} more: penstock pipeline audit shows them` }));
  card.append(make("details", {}, make("summary", { text: "What was checked" }), make("ul", {}, ...checks.map((each) =>
    make("li", { class: each.findings ? "failed" : "" }, make("span", { class: "mark", text: each.findings ? "✗" : "✓" }),
      make("b", { text: each.name }), `: ${each.what}` + (each.findings ? ` (${count(each.findings)})` : ""))))));
  by("verdict").append(card);
  if (data.behind.length) by("verdict").append(make("p", { class: "notice", text:
    `These tables are older than the events: ${data.behind.join(", ")}. Run penstock pipeline run to update them.` }));
}

function tiles() {
  const f = data.figures;
  const shown = [
    ["pushed", few(f.pushed), "messages pushed", `${bytes(f.body_bytes)} of bodies`],
    ["deleted", few(f.deleted), "deleted: done", percent(f.deleted, f.pushed)],
    ["live", few(f.live), "still there", `${few(f.in_flight)} in flight`],
    ["redelivered", few(f.redelivered), "pulled again", percent(f.redelivered, f.pulled)],
    ["dead_letters", few(f.dead_letters), "dead letters", `${few(f.dead)} still there`],
    ["ended", few(f.expired + f.purged + f.removed + f.lost), "ended otherwise", `${few(f.expired)} expired, ${few(f.lost)} lost`],
  ];
  shown.forEach(([name, value, label, more]) => by("figures").append(make("div", { class: "card tile", "data-figure": name,
    title: name in f ? count(f[name]) : "" }, make("b", { text: value }), make("span", { text: label }), make("small", { text: more }))));
}

const COLUMNS = [
  ["queue", "queue", (v) => v], ["messages", "messages", count], ["visible", "visible", count], ["delayed", "delayed", count],
  ["in_flight", "in flight", count], ["oldest_age_ms", "oldest", duration], ["stored_bytes", "stored", bytes],
  ["pushed", "pushed", count], ["deleted", "deleted", count], ["expired", "expired", count],
  ["timeouts", "timeouts", count], ["dead_letters", "dead letters", count], ["wait_p99_ms", "p99 wait", duration],
];
function queueTable() {
  const rows = [...data.queues.rows];
  const body = make("tbody");
  const heads = COLUMNS.map(([key, name]) => make("th", { scope: "col", "data-key": key },
    make("button", { type: "button", text: name, on: { click: () => sort(key) } })));
  let sorted = null, down = true;
  function sort(key) {
    down = sorted === key ? !down : key !== "queue";
    sorted = key;
    rows.sort((a, b) => (down ? -1 : 1) * (key === "queue" ? a.queue.localeCompare(b.queue) : (a[key] ?? -1) - (b[key] ?? -1)));
    heads.forEach((head) => {
      if (head.dataset.key === key) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...rows.map((row) => make("tr", {}, ...COLUMNS.map(([name, , format]) => make("td", {
      text: format(row[name]), title: name === "queue" ? row.queue : undefined, "data-key": name,
      "data-value": row[name] ?? "", class: row[name] ? undefined : "zero" })))));
  }
  sort("pushed");
  by("queues").append(make("div", { class: "card scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body)));
  if (data.queues.more) by("queues").append(make("p", { class: "more", text: `and ${count(data.queues.more)} more` }));
}

function redelivery() {
  const r = data.redelivery;
  by("redelivery").append(
    bars("How often messages were pulled", [["s2", "deleted in the end"], ["s1", "dead"], ["s6", "otherwise"]],
      r.claims.map((c) => ({ name: c.name, said: count(c.messages),
        parts: [c.deleted, c.dead, Math.max(0, c.messages - c.deleted - c.dead)] }))),
    bars("How claims ended", [["s0", "claims"]], r.ended.map((e) => ({ name: e.name, said: count(e.claims), parts: [e.claims] }))),
    bars("Why messages came back", [["s3", "timed out"], ["s4", "released"]],
      r.queues.map((q) => ({ name: q.queue, said: count(q.timeouts + q.releases), parts: [q.timeouts, q.releases] })), r.more),
    bars("Who held them then", [["s3", "timed out"], ["s4", "released"]],
      r.holders.map((h) => ({ name: h.holder || "(gave no name)", said: count(h.timed_out + h.released), parts: [h.timed_out, h.released] }))));
}

function deadLetters() {
  const d = data.dead_letters;
  const kinds = [["s3", "always timed out"], ["s4", "always released"], ["s6", "both"]];
  by("dead").append(
    bars("Where they came from, and why", kinds, d.queues.map((q) => ({ name: q.queue, said: count(q.messages),
      parts: [q.timed_out, q.released, q.both] })), d.more),
    bars("Who held them last", [["s1", "dead letters"]], d.holders.map((h) => ({ name: h.holder ?? "(gave no name)", said: count(h.messages), parts: [h.messages] }))));
}

function theme() {
  const button = by("theme"), root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  const showMode = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-pressed", String(isDark())); };
  // A page from a file may have no storage; the choice then lasts as long as the page.
  try { const kept = localStorage.getItem("penstock-theme"); if (kept === "dark" || kept === "light") root.dataset.theme = kept; } catch { /* none */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("penstock-theme", root.dataset.theme); } catch { /* none */ }
    showMode();
  });
  system.addEventListener("change", showMode);
  showMode();
}

theme();
by("lake").textContent = data.lake;
by("span").textContent = data.events ? `${moment(data.time.first_ms)} to ${moment(data.time.to_ms)} UTC, ${duration(data.time.to_ms - data.time.first_ms)}` : "No events yet";
verdict();
tiles();
const kindOf = (each, i) => each.others ? "s6" : `s${i}`;
const named = (each) => each.others ? `${count(each.others)} other queues` : each.queue;
lineChart(by("depth"), "Depth", data.depth.map((each, i) => ({ name: named(each), kind: kindOf(each, i), values: each.messages })),
  (v, short) => short ? few(v) : count(v), false, data.time);
lineChart(by("age"), "Age", data.depth.map((each, i) => ({ name: named(each), kind: kindOf(each, i), values: each.age_ms.map((v) => v ?? 0) })),
  (v, short) => v ? duration(v) : short ? "0" : "empty", true, data.time);
for (const name of Object.keys(MEASURES)) by("measures").append(make("button", { type: "button", text: name,
  "aria-pressed": "false", on: { click: () => showMeasure(name) } }));
showMeasure("wait");
redelivery();
deadLetters();
heatMap(by("hot-queues"), data.hot_queues, "Events of the busiest queues");
if (data.hot_groups.rows.length) heatMap(by("hot-groups"), data.hot_groups, "Messages of the busiest groups");
else by("groups-section").hidden = true;
queueTable();
by("made").textContent = `Made ${moment(data.made_at_ms)} UTC by Penstock ${data.version} from ${plural(data.events, "event")}.${data.dropped
  ? ` Of ${plural(data.dropped, "message")} the events were dropped; what follows from them is kept.` : ""} All times are UTC.`;
