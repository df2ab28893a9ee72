// One message: what it is, and its whole life as a drawn timeline and in sentences.
import { bytes, count, day, duration, make, moment, plural } from "./draw.js";
import { change, follow, read } from "./server.js";
import { alertNode, ask, link, now, queueLink, repaint, say, setNow } from "./parts.js";
import { sendAgain } from "./send.js";
import { bodyNode } from "./messages.js";

const READ_MS = 2000;
const ENDED = ["deleted", "expired", "lost", "moved"];
const KINDS = { visible: "Waited", delayed: "Delayed", "in flight": "Held", moving: "Moving", known: "In the queue" };

// The time of day to the millisecond: much of a life may pass in one second.
const toMs = (at) => `${moment(at).slice(11)}.${String(at % 1000).padStart(3, "0")}`;

// Short times would be too small to see beside long ones: an episode's width follows the root of its duration.
function timeline(life) {
  const root = make("ol", { class: "life" });
  const now = life.now_ms;
  const most = Math.max(1, ...life.episodes.map((each) => (each.until_ms ?? now) - each.from_ms));
  const last = life.events.at(-1);
  const isDead = (episode) => life.events.some((each) => each.dead && each.to === episode.queue && each.at_ms === episode.from_ms);
  const first = life.events[0];
  if (first?.kind === "Pushed") root.append(make("li", { class: "pushed" }, make("time", { text: toMs(first.at_ms), title: `${moment(first.at_ms)} UTC` }), make("span", { class: "mark" }), make("p", {}, make("b", { text: "Pushed" }), make("span", { class: "soft", text: ` by ${first.holder || "a producer whose name was not kept"} to ` }), queueLink(first.queue))));
  life.episodes.forEach((each, i) => {
    const lasted = (each.until_ms ?? now) - each.from_ms;
    const before = life.episodes[i - 1];
    if (before && before.queue !== each.queue) root.append(make("li", { class: "moved" }, make("time", { text: toMs(each.from_ms) }), make("span", { class: "mark" }), make("p", {}, make("span", { text: isDead(each) ? "Became a dead letter in " : "Moved to " }), queueLink(each.queue))));
    if (!lasted && each.state === "visible" && each.until_ms !== null) return;
    const bar = make("span", { class: "bar-track" }, make("i", {}));
    bar.firstChild.style.width = `${Math.max(2, 100 * Math.sqrt(lasted / most))}%`;
    root.append(make("li", { "data-state": each.state, "data-end": each.end || (each.until_ms === null ? "now" : "") },
      make("time", { text: toMs(each.from_ms), title: `${moment(each.from_ms)} UTC` }), make("span", { class: "mark" }),
      make("p", {}, make("b", { text: each.state === "in flight" ? each.holder || "a consumer without a name" : KINDS[each.state] }), make("span", { class: "soft", text: `${each.state === "in flight" ? " held it" : ""} ${each.until_ms === null ? "for" : ""} ${duration(lasted)}${each.until_ms === null ? " so far" : ""}` }),
        ...(each.end ? [make("span", { class: "end", text: { deleted: "deleted it", released: "released it", "ran out": "its claim ran out", lost: "its content is damaged" }[each.end] })] : []),
        ...(each.until_ms === null && each.deadline_ms ? [make("span", { class: "soft", text: ` until ${moment(each.deadline_ms).slice(11)}${each.state === "in flight" ? " at most" : ""}` })] : [])), bar));
  });
  const ends = { deleted: "Deleted", expired: "Expired", lost: "Lost", moved: "Arrived in another shard" };
  if (life.state in ends && last) root.append(make("li", { class: "ended" }, make("time", { text: toMs(last.at_ms) }), make("span", { class: "mark" }), make("p", {}, make("b", { text: ends[life.state] }))));
  return root;
}

function eventsTable(events) {
  return make("details", {}, make("summary", { text: plural(events.length, "event") }), make("div", { class: "scroll" }, make("table", { class: "plain" },
    make("thead", {}, make("tr", {}, ...["At (UTC)", "Event", "Queue", "Claim", "Detail"].map((text) => make("th", { scope: "col", text })))),
    make("tbody", {}, ...events.map((each) => make("tr", {}, make("td", { text: `${day(each.at_ms)} ${toMs(each.at_ms)}` }), make("td", { text: each.kind }), make("td", { text: each.queue }), make("td", { text: each.epoch ?? "" }), make("td", { text: each.words })))))));
}

export function messagePage(main, app, queue, id) {
  document.title = `Message ${id.slice(-12)} · Penstock`;
  const may = app.session.may_change;
  const place = make("p", { class: "crumbs" }, link("#/", "Queues"));
  const actions = make("div", { class: "actions" });
  const why = make("section", { class: "sentences", "aria-label": "What happened" });
  const drawn = make("section", { class: "card" });
  const content = make("section");
  main.append(make("header", { class: "head" }, place, make("div", { class: "title" }, make("h1", { class: "mono", text: id })), actions), why, make("div", { class: "message-page" }, make("section", {}, make("h2", { text: "Life" }), drawn), content));
  let ended = false, stop = null, followed = null, lastRead = 0, waiting = 0, seen = "";

  function showContent(message, where) {
    content.replaceChildren(make("h2", { text: "Message" }));
    actions.replaceChildren();
    if (!message) { content.append(make("p", { class: "card soft", text: "It is not in a queue any more, so its body is not shown." })); return; }
    const facts = [["Queue", queueLink(message.queue)], ["Pushed", `${moment(message.pushed_at_ms)} UTC`], ["Pulled", `${message.receives} time${message.receives === 1 ? "" : "s"}`], ["Size", bytes(message.bytes)], ["Group", message.group], ["Priority", message.priority || null], ["Dedup id", message.dedup_id], ["Dead letter of", message.source && queueLink(message.source)]];
    const names = Object.entries(message.attributes || {});
    const raw = bodyNode(message), isJson = !!raw.querySelector(".json");
    content.append(make("div", { class: "card" }, make("dl", { class: "facts" }, ...facts.filter(([, value]) => value).flatMap(([name, value]) => [make("dt", { text: name }), make("dd", {}, value)])),
      ...(names.length ? [make("h3", { text: "Attributes" }), make("dl", { class: "facts" }, ...names.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { class: "mono", text: value === null ? "masked" : typeof value === "string" ? value : `base64: ${value.base64}` })]))] : []),
      make("h3", { text: message.is_binary ? "Body, in base64" : isJson ? "Body, as JSON" : "Body" }), raw));
    if (!may) return;
    const act = (label, kind, run, key) => actions.append(make("button", { type: "button", class: kind, text: label, "data-key": key, on: { click: async () => {
      try { await run(); } catch (error) { say(error.message, true); }
    } } }));
    if (!message.is_masked && !message.is_binary) act("Edit and send again", "primary", () => sendAgain(message), "e");
    if (where === "visible" && message.source) act(`Redrive to ${message.source}`, "", async () => {
      const { count: moved } = await change("redrive", { queue: message.queue, ids: [id] });
      say(moved ? `Moved to ${message.source}.` : "It is not visible any more.");
      load();
    }, "r");
    if (where === "in flight" || where === "delayed") act("Make visible now", "", async () => {
      if (where === "in flight" && !await ask("Make it visible now?", "Its consumer loses the claim: another one may get the message while this one still works.", "Make visible")) return;
      await change("release", { queue: message.queue, ids: [id] });
      load();
    }, "v");
    if (where === "visible" || !where) act("Delete", "danger", async () => {
      if (!await ask("Delete this message?", "It cannot be brought back.", "Delete")) return;
      const { count: deleted } = await change("delete", { queue: message.queue, ids: [id] });
      say(deleted ? "The message is deleted." : "It is held by a consumer, or gone.", !deleted);
      load();
    });
  }
  async function load() {
    lastRead = Date.now();
    const life = await read("life", { id }).catch((error) => ({ error }));
    const isOver = ENDED.includes(life.state);
    const where = life.queue && !isOver ? life.queue : queue;
    const found = where === "-" ? { message: null } : await read("message", { queue: where, id }).catch((error) => ({ error }));
    if (ended) return;
    if (found.error && found.error.status !== 400) throw found.error;
    if (life.now_ms) setNow(life.now_ms);
    // The times go on by themselves; everything else is left alone while nothing happens.
    const text = JSON.stringify([life.error?.message ?? life.events, found.error?.message ?? found.message]);
    repaint(main, () => paint(life, where, text === seen ? null : found));
    seen = text;
    // The server still reads what was before its start, and goes on where it is asked again.
    if (life.error?.status === 503) again();
    if (isOver || where === "-") { stop?.(); stop = followed = null; app.tell("live"); } else followQueue(where);
  }
  function paint(life, where, found) {
    const isOpen = drawn.querySelector("details")?.open;
    why.replaceChildren(...(life.sentences || []).map((text) => make("p", { text })));
    drawn.replaceChildren(...(life.error ? [make("p", { class: "soft", text: life.error.status === 503 ? `${life.error.message.split(";")[0]} …` : life.error.message })] : [timeline(life), eventsTable(life.events)]));
    if (isOpen) drawn.querySelector("details").open = true;
    if (life.left_out) drawn.append(make("p", { class: "soft", text: `${count(life.left_out)} events in the middle are left out.` }));
    place.replaceChildren(link("#/", "Queues"), make("span", { text: " / " }), ...(where !== "-" ? [queueLink(where)] : []));
    if (found?.error) content.replaceChildren(make("h2", { text: "Message" }), alertNode(found.error.message));
    else if (found) showContent(found.message, life.state);
  }
  function again(pause = 200) {
    if (!waiting) waiting = setTimeout(() => { waiting = 0; load().catch((error) => app.tell("lost", error)); }, pause);
  }
  // Something happened in its queue, perhaps to it.
  function followQueue(name) {
    if (name === followed) return;
    stop?.();
    followed = name;
    stop = follow(name, async () => {
      if (Date.now() - lastRead > READ_MS) await load();
      return now();
    }, () => again(Math.max(0, lastRead + READ_MS - Date.now())), app.tell);
  }
  load().catch((error) => { content.replaceChildren(alertNode(error.message)); app.tell("lost", error); });
  return () => { ended = true; clearTimeout(waiting); stop?.(); };
}
