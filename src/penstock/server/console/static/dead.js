// Dead letters as a workbench: the queues that have some, and the messages of one in groups.
import { count, few, make, moment, plural } from "./draw.js";
import { change, follow, read } from "./server.js";
import { age, ask, link, queueLink, repaint, say, setNow } from "./parts.js";
import { sendAgain } from "./send.js";
import { actOn, bodyButton, messageHash } from "./messages.js";
import { redriveDialog } from "./redrive.js";

const LISTED = 10;
const ages = (group) => {
  const [youngest, oldest] = [age(group.newest_ms), age(group.oldest_ms)];
  return youngest === oldest ? `${oldest} old` : `${youngest} to ${oldest} old`;
};

export function deadPage(main, app, chosen) {
  document.title = "Dead letters · Penstock";
  const may = app.session.may_change;
  const list = make("nav", { class: "card side", "aria-label": "Queues of dead letters" });
  const bench = make("section", { class: "bench" });
  main.append(make("h1", { text: "Dead letters" }), make("p", { class: "soft lead", text: "Messages that were pulled too often without being deleted. Looking at them claims nothing." }), make("div", { class: "two" }, list, bench));
  const board = { rows: new Map(), groups: [], picked: new Set(), running: null, filter: "" };
  const text = (node, value) => { if (node.textContent !== value) node.textContent = value; };

  const queues = () => {
    const sources = new Map();
    for (const each of board.rows.values()) if (each.dead_letter) sources.set(each.dead_letter, [...(sources.get(each.dead_letter) || []), each.name]);
    for (const name of board.rows.keys()) if (/[.-]failed$/.test(name) && !sources.has(name)) sources.set(name, [name.replace(/[.-]failed$/, "")]);
    return [...sources].filter(([name]) => board.rows.has(name)).map(([name, from]) => ({ ...board.rows.get(name), from })).sort((a, b) => b.visible - a.visible || (a.name < b.name ? -1 : 1));
  };
  function paintList() {
    const all = queues();
    if (!chosen || !board.rows.has(chosen)) chosen = all.find((each) => each.visible)?.name || all[0]?.name;
    list.replaceChildren(...all.map((each) => make("a", { "data-row": "", "data-id": `queue ${each.name}`, href: `#/dead/${encodeURIComponent(each.name)}`, ...(each.name === chosen ? { "aria-current": "page" } : {}), class: each.visible ? "has" : "" },
      make("b", { text: few(each.visible) }), make("span", {}, make("span", { text: each.name }), make("small", { text: `from ${each.from.join(", ")}` })))));
    if (!all.length) list.append(make("p", { class: "empty", text: "No queue has a dead-letter queue. Set one in the settings of a queue." }));
  }
  const status = make("p", { class: "status", role: "status" });
  const acts = make("div", { class: "acts", hidden: "" }), picked = make("span");
  const groupList = make("div", { class: "groups" });
  const search = make("input", { type: "search", placeholder: "Filter by source, error or shape", "aria-label": "Filter the groups", spellcheck: "false" });
  const shown = () => board.groups.filter((each) => `${each.source} ${each.error} ${each.shape}`.toLowerCase().includes(board.filter));
  const ids = (groups) => groups.flatMap((each) => each.ids);
  const everything = make("input", { type: "checkbox", on: { change: () => { pick(ids(shown()), everything.checked); paintGroups(); } } });
  const pickAll = make("label", { class: "pick-all", hidden: "" }, everything, make("span"));
  const chosenIds = () => [...board.picked];
  const button = (label, kind, run, key) => make("button", { type: "button", class: kind, text: label, "data-key": key, on: { click: async () => { try { await run(); } catch (error) { say(error.message, true); } } } });
  async function perform(name, label, wanted) {
    const stop = { now: false };
    const halt = make("button", { type: "button", class: "quiet", text: "Stop", on: { click: () => { stop.now = true; } } });
    const { done, left } = await actOn(name, chosen, wanted, {}, (at, of) => { status.replaceChildren(make("span", { text: `${label} ${count(at)} of ${count(of)} …` }), halt); }, () => stop.now);
    say(`${label} ${plural(done, "message")}.${left ? ` ${plural(left, "other")} could not be.` : ""}`);
    load();
  }
  acts.append(picked, button("Redrive", "primary", () => perform("redrive", "Moved", chosenIds())), button("Delete", "danger", async () => {
    if (await ask(`Delete ${plural(board.picked.size, "message")}?`, "They cannot be brought back.", "Delete")) await perform("delete", "Deleted", chosenIds());
  }), button("Clear", "quiet", () => { board.picked.clear(); paintGroups(); }));

  function paintActs() {
    acts.hidden = !board.picked.size || !may;
    text(picked, `${count(board.picked.size)} selected`);
    const groups = shown();
    everything.parentNode.hidden = !may || !groups.length;
    text(everything.nextSibling, board.filter ? `Select the ${plural(ids(groups).length, "message")} shown` : `Select all ${plural(ids(groups).length, "message")}`);
    everything.checked = groups.length > 0 && ids(groups).every((id) => board.picked.has(id));
  }
  function pick(wanted, isPicked) {
    for (const id of wanted) if (isPicked) board.picked.add(id); else board.picked.delete(id);
    for (const box of groupList.querySelectorAll("[data-pick]")) box.checked = board.picked.has(box.dataset.pick);
    paintActs();
  }
  const paintGroups = () => repaint(bench, paintAll);
  function paintAll() {
    groupList.replaceChildren(...shown().map((group) => {
      const isAll = group.ids.every((id) => board.picked.has(id));
      const box = make("input", { type: "checkbox", "aria-label": `Select ${plural(group.ids.length, "message")}`, ...(isAll ? { checked: "" } : {}), on: { change(event) {
        pick(group.ids, event.target.checked);
      } } });
      const details = make("details", { "data-row": "", "data-id": `group ${group.source} ${group.error} ${group.shape}`, ...(group.isOpen ? { open: "" } : {}), on: { toggle: () => { group.isOpen = details.open; if (details.open) paintMessages(group, details); } } },
        make("summary", {}, ...(may ? [make("span", { class: "pick", on: { click: (event) => event.stopPropagation() } }, box)] : []),
          make("b", { class: "n", text: few(group.ids.length), title: count(group.ids.length) }),
          make("span", { class: "what" }, make("span", { class: group.error ? "error" : "soft", text: group.error || "no error is noted" }), make("code", { text: group.shape })),
          make("span", { class: "from" }, make("span", { text: group.source ? `from ${group.source}` : "of unknown source" }), make("small", { text: ages(group) }))));
      if (group.isOpen) paintMessages(group, details);
      return details;
    }));
    if (!board.groups.length && !board.running) groupList.append(make("p", { class: "empty", text: "No dead letters here." }));
    paintActs();
  }
  async function paintMessages(group, details) {
    details.querySelector(".inside")?.remove();
    const inside = make("div", { class: "inside" }, make("p", { class: "soft", text: "Reading …" }));
    details.append(inside);
    const found = await Promise.all(group.ids.slice(0, LISTED).map((id) => read("message", { queue: chosen, id }).then(({ message }) => message).catch(() => null)));
    inside.replaceChildren(make("table", { class: "messages" }, make("tbody", {}, ...found.filter(Boolean).map((message) => make("tr", {},
      ...(may ? [make("td", { class: "c-pick" }, make("input", { type: "checkbox", "aria-label": `Select ${message.id}`, "data-pick": message.id, ...(board.picked.has(message.id) ? { checked: "" } : {}), on: { change(event) {
        pick([message.id], event.target.checked);
        details.querySelector(".pick input").checked = group.ids.every((id) => board.picked.has(id));
      } } }))] : []),
      make("td", { class: "c-id" }, link(messageHash(chosen, message.id), message.id.slice(-12), { title: message.id })), make("td", { class: "c-body" }, bodyButton(chosen, message, may ? 5 : 3)),
      make("td", { class: "c-age", text: age(message.pushed_at_ms), title: `${moment(message.pushed_at_ms)} UTC` }),
      ...(may && !message.is_masked && !message.is_binary ? [make("td", { class: "c-do" }, button("Edit and send", "quiet", () => sendAgain(message)))] : []))))),
    ...(group.ids.length > LISTED ? [make("p", { class: "soft", text: `and ${plural(group.ids.length - LISTED, "more message")} alike` })] : []));
  }
  async function load() {
    board.running?.abort();
    const mine = board.running = new AbortController();
    board.groups = [];
    board.picked.clear();
    if (!chosen) { bench.replaceChildren(); return; }
    const row = board.rows.get(chosen);
    bench.replaceChildren(make("div", { class: "card table-card" }, make("div", { class: "table-head" }, make("h2", {}, queueLink(chosen)), search,
      ...(may ? [button("Redrive all", "", () => redriveDialog(chosen, { queue: board.rows.get(chosen), sources: queues().find((each) => each.name === chosen)?.from || [] }, load), "r"), button("Delete all", "danger", async () => {
        if (await ask(`Delete all of ${chosen}?`, `All ${plural(board.rows.get(chosen).visible, "dead letter")} are deleted. They cannot be brought back.`, "Delete all", chosen)) {
          const done = await change("purge", { queue: chosen });
          say(`${plural(done.count, "message")} deleted.`);
          load();
        }
      })] : [])), status, pickAll, acts, groupList));
    status.textContent = row?.visible ? "Reading …" : "";
    paintGroups();
    try {
      let seen = 0;
      for (let after = 0, isDone = false; !isDone && !mine.signal.aborted;) {
        const part = await read("dead-letters", { queue: chosen, after }, mine.signal);
        ({ after, is_done: isDone } = part);
        seen += part.read;
        for (const group of part.groups) {
          const known = board.groups.find((each) => each.source === group.source && each.error === group.error && each.shape === group.shape);
          if (!known) { board.groups.push(group); continue; }
          known.ids.push(...group.ids);
          known.oldest_ms = Math.min(known.oldest_ms, group.oldest_ms);
          known.newest_ms = Math.max(known.newest_ms, group.newest_ms);
        }
        board.groups.sort((a, b) => b.ids.length - a.ids.length);
        text(status, seen ? `${plural(seen, "message")} in ${plural(board.groups.length, "group")}${isDone ? "." : " …"}` : "");
        paintGroups();
      }
    } catch (error) { if (!mine.signal.aborted) status.textContent = error.message; }
    if (board.running === mine) { board.running = null; paintGroups(); }
  }
  search.addEventListener("input", () => { board.filter = search.value.toLowerCase(); board.picked.clear(); paintGroups(); });
  search.addEventListener("keydown", (event) => { if (event.key === "Escape") { search.value = board.filter = ""; paintGroups(); search.blur(); } });

  let isLoaded = false;
  const stop = follow("", async () => {
    const all = await read("queues");
    setNow(all.at_ms);
    board.rows = new Map(all.queues.map((each) => [each.name, each]));
    paintList();
    if (!isLoaded) { isLoaded = true; load(); }
    return all.at_ms;
  }, (event) => {
    setNow(event.at_ms);
    for (const name of event.gone || []) board.rows.delete(name);
    for (const each of event.queues) board.rows.set(each.name, each);
    if (event.queues.length || event.gone) paintList();
  }, app.tell);
  return () => { board.running?.abort(); stop(); };
}
