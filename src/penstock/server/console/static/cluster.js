// The cluster: its nodes, and each shard with its owner, term and standby.
import { bytes, count, make, plural } from "./draw.js";
import { follow, read } from "./server.js";
import { now, repaint } from "./parts.js";

const READ_MS = 2000;

export function clusterPage(main, app) {
  document.title = "Cluster · Penstock";
  const verdict = make("section", { class: "verdict", "aria-live": "polite" }, make("span", { class: "dot" }), make("h1", { text: "Asking the nodes …" }), make("p"));
  const nodes = make("section"), shards = make("section");
  main.append(verdict, nodes, shards);
  const cell = (text, options = {}) => make("td", { text: text === null || text === undefined ? "–" : String(text), ...options });
  const head = (...names) => make("thead", {}, make("tr", {}, ...names.map((text) => make("th", { scope: "col", text }))));
  const card = (title, table) => [make("h2", { text: title }), make("div", { class: "card table-card scroll" }, table)];

  function paint(status) {
    const down = status.nodes.filter((each) => !each.is_live), ownerless = status.shards.filter((each) => !each.is_live), stalled = status.shards.filter((each) => each.stall);
    const alone = status.shards.filter((each) => each.is_live && !each.standby);
    const [kind, title] = ownerless.length ? ["bad", `${plural(ownerless.length, "shard")} ${ownerless.length === 1 ? "has" : "have"} no live owner.`]
      : stalled.length ? ["bad", `${plural(stalled.length, "shard")} cannot be written.`]
        : down.length || alone.length ? ["warn", "Every shard is served."] : ["good", "Every shard is served, and has a standby."];
    verdict.dataset.kind = kind;
    verdict.children[1].textContent = title;
    verdict.children[2].textContent = [...(down.length ? [`down: ${down.map((each) => each.node).join(", ")}`] : []), ...(alone.length ? [`${plural(alone.length, "shard")} without a standby`] : []), ...(stalled.length ? [stalled[0].stall] : [])].join(" · ");
    nodes.replaceChildren(...card("Nodes", make("table", { class: "plain" }, head("Node", "State", "Address", "Owns", "Stands by for", "Gaps in the log"),
      make("tbody", {}, ...status.nodes.map((each) => make("tr", { "data-row": "", tabindex: "-1", "data-id": `node ${each.node}` }, make("td", {}, make("span", { class: `dot ${each.is_live ? "" : "down"}` }), make("b", { text: ` ${each.node}` })), cell(each.state), cell(each.endpoint, { class: "mono" }), cell(plural(each.owned, "shard")), cell(plural(each.standby, "shard")), cell(each.gaps, { class: each.gaps ? "failed" : "zero" })))))));
    shards.replaceChildren(...card("Shards", make("table", { class: "plain" }, head("Shard", "Owner", "Term", "Standby", "Lag", "Queues", "Waiting entries", "Not archived"),
      make("tbody", {}, ...status.shards.map((each) => make("tr", { "data-row": "", tabindex: "-1", "data-id": `shard ${each.shard}` }, make("td", {}, make("span", { class: `dot ${each.is_live ? "" : "down"}` }), make("b", { text: ` ${each.shard}` })), cell(each.owner, { title: each.stall || "" }), cell(count(each.term)), cell(each.standby, { class: each.standby ? "" : "zero" }), cell(each.standby_lag === null ? null : each.standby_lag ? `${plural(each.standby_lag, "slot")}` : "none", { class: each.standby_lag ? "" : "zero" }), cell(each.queues), cell(each.waiting_entries), cell(each.archive_error || (each.unarchived_bytes ? bytes(each.unarchived_bytes) : "none"), { class: each.archive_error ? "failed" : "zero" })))))));
  }
  let lastRead = 0, waiting = 0;
  async function load() {
    const status = await read("cluster");
    lastRead = Date.now();
    repaint(main, () => paint(status));
    return now();
  }
  const fail = (error) => {
    verdict.dataset.kind = "bad";
    verdict.children[1].textContent = "The cluster does not answer.";
    verdict.children[2].textContent = error.message;
  };
  const stop = follow("", async () => {
    try { return await load(); } catch (error) { if (error.status !== 503) throw error; fail(error); return now(); }
  }, () => {
    if (waiting) return;
    waiting = setTimeout(() => { waiting = 0; load().catch(fail); }, Math.max(0, lastRead + READ_MS - Date.now()));
  }, app.tell);
  return () => { clearTimeout(waiting); stop(); };
}
