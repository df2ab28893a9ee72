// Tasks: by function, those that failed with their tracebacks, those that wait, and the schedules.
import { about, count, few, make, moment, plural } from "./draw.js";
import { change, follow, read } from "./server.js";
import { age, ask, link, now, queueLink, repaint, say, setNow } from "./parts.js";
import { messageHash } from "./messages.js";

const READ_MS = 3000;
const SHOWN_MAX = 25;
const STATES = ["waiting", "running", "delayed", "failed"];

export function tasksPage(main, app) {
  document.title = "Tasks · Penstock";
  const may = app.session.may_change;
  const status = make("p", { class: "status", role: "status", text: "Reading …" });
  const functions = make("section"), failures = make("section"), tasks = make("section"), schedules = make("section");
  main.append(make("h1", { text: "Tasks" }), make("p", { class: "soft lead", text: "What workers have to run, and what failed for the last time." }), status, functions, failures, schedules, tasks);
  const view = { filter: "", all: null, open: new Set() };
  const act = (label, kind, run) => make("button", { type: "button", class: kind, text: label, on: { async click(event) {
    event.preventDefault();
    event.stopPropagation();
    try { await run(); } catch (error) { say(error.message, true); }
  } } });
  const head = (...names) => make("thead", {}, make("tr", {}, ...names.map((text) => make("th", { scope: "col", text }))));
  const isShown = (each) => !view.filter || each.task === view.filter;
  const retry = async (queue, ids) => {
    const { count: retried } = await change("retry-tasks", { queue, ids });
    say(`${plural(retried, "task")} retried.`);
    await load();
  };

  function paintFunctions() {
    const rows = [...view.all.functions].sort((a, b) => b.failed - a.failed || b.waiting - a.waiting || (a.task < b.task ? -1 : 1));
    functions.replaceChildren(make("h2", { text: "By function" }), make("div", { class: "card table-card scroll" }, make("table", { class: "plain numbers" }, head("Function", "Queue", ...STATES, "tried before"),
      make("tbody", {}, ...rows.map((each) => make("tr", { "data-row": "", "data-id": `${each.queue} ${each.task}`, class: view.filter === each.task ? "is-chosen" : "" },
        make("td", {}, make("button", { type: "button", class: "quiet name", "aria-pressed": String(view.filter === each.task), text: each.task || "(not a task)", on: { click: () => { view.filter = view.filter === each.task ? "" : each.task; paint(); } } })),
        make("td", {}, queueLink(each.queue)), ...STATES.map((state) => make("td", { class: each[state] ? state : "zero", text: few(each[state]) })), make("td", { class: each.retries ? "" : "zero", text: few(each.retries) })))))));
  }
  function paintFailures() {
    const found = view.all.failures.filter(isShown);
    failures.replaceChildren();
    if (!found.length) return;
    const queues = [...new Set(found.map((each) => each.queue))];
    failures.append(make("div", { class: "section-head" }, make("h2", { text: `Failed${view.filter ? `: ${view.filter}` : ""}` }),
      ...(may && view.filter ? [act(`Retry all ${plural(found.length, "task")} shown`, "", async () => { for (const queue of queues) await retry(queue, found.filter((each) => each.queue === queue).map((each) => each.id)); })] : may ? queues.map((queue) => act(`Retry all of ${queue}`, "", async () => {
        if (await ask(`Retry all failed tasks of ${queue}?`, "Each is pushed again, with all attempts left.", "Retry all")) await retry(queue, null);
      })) : [])),
    make("div", { class: "card table-card groups failures" }, ...found.slice(0, SHOWN_MAX).map((each) => make("details", { "data-row": "", "data-id": each.message, ...(view.open.has(each.message) ? { open: "" } : {}), on: { toggle: (event) => { if (event.target.open) view.open.add(each.message); else view.open.delete(each.message); } } },
      make("summary", {}, make("span", { class: "what" }, make("span", { class: "error", text: each.error || "no error is noted" }), make("code", { text: each.task || "not a task" })),
        make("span", { class: "from" }, make("span", { text: each.queue }), make("small", { text: `${age(each.failed_at_ms)} ago, after ${plural(each.failures, "attempt")}`, title: `${moment(each.failed_at_ms)} UTC` })),
        ...(may ? [act("Retry", "", () => retry(each.queue, [each.id]))] : [])),
      make("div", { class: "inside" }, make("pre", { class: "body", text: each.traceback || "No traceback is kept." }), make("p", {}, link(messageHash(`${each.queue}.failed`, each.message), `message ${each.message}`)))))));
    if (found.length > SHOWN_MAX) failures.append(make("p", { class: "more", text: `The newest ${SHOWN_MAX} of ${count(found.length)} are shown.` }));
  }
  function paintTasks() {
    const found = view.all.tasks.filter(isShown);
    tasks.replaceChildren();
    if (!found.length) return;
    tasks.append(make("h2", { text: "To run" }), make("div", { class: "card table-card scroll" }, make("table", { class: "plain" }, head("Task", "Function", "State", "Pushed", "Failures", ...(may ? [""] : [])),
      make("tbody", {}, ...found.slice(0, 100).map((each) => make("tr", { "data-row": "", "data-id": each.message }, make("td", {}, link(messageHash(each.queue, each.message), each.id.slice(-12), { class: "mono accent", title: each.id })), make("td", { text: each.task }), make("td", {}, make("span", { class: `state ${each.state}`, text: each.state })), make("td", { text: `${age(each.pushed_at_ms)} ago` }), make("td", { class: each.failures ? "" : "zero", text: count(each.failures) }),
        ...(may ? [make("td", { class: "do" }, act("Cancel", "quiet", async () => { await change("cancel-task", { id: each.id, queue: each.queue }); say("Cancelled: a worker drops it when it gets it."); }))] : [])))))));
    if (found.length > 100) tasks.append(make("p", { class: "more", text: `The first 100 are shown.` }));
  }
  function paintSchedules() {
    schedules.replaceChildren();
    if (!view.all.schedules.length) return;
    const soon = (at) => at === null ? "–" : at <= now() ? "due now" : `in ${about(at - now())}`;
    schedules.append(make("h2", { text: "Schedules" }), make("div", { class: "card table-card scroll" }, make("table", { class: "plain" }, head("Schedule", "Function", "When", "Next", "Last"),
      make("tbody", {}, ...[...view.all.schedules].sort((a, b) => (a.next_ms ?? 0) - (b.next_ms ?? 0)).map((each) => make("tr", { "data-row": "", tabindex: "-1", "data-id": `schedule ${each.app} ${each.name}` }, make("td", { text: each.name, title: each.app }), make("td", { text: each.task || "–" }), make("td", { class: "mono", text: each.when || "–" }), make("td", { text: soon(each.next_ms), title: each.next_ms ? `${moment(each.next_ms)} UTC` : "" }), make("td", { text: each.last_ms ? `${age(each.last_ms)} ago` : "never", title: each.last_ms ? `${moment(each.last_ms)} UTC` : "" })))))));
  }
  const paint = () => repaint(main, paintAll);
  function paintAll() {
    const sum = (state) => view.all.functions.reduce((all, each) => all + each[state], 0);
    status.textContent = view.all.functions.length ? STATES.map((state) => `${count(sum(state))} ${state}`).join(" · ") : "No tasks: no queue of this store has any.";
    if (view.all.functions.length) paintFunctions(); else functions.replaceChildren();
    paintFailures();
    paintTasks();
    paintSchedules();
  }
  async function load() {
    const found = await read("tasks");
    setNow(found.now_ms);
    const isSame = JSON.stringify({ ...found, now_ms: 0 }) === JSON.stringify({ ...view.all, now_ms: 0 });
    view.all = found;
    lastRead = Date.now();
    // What somebody is about to press does not move.
    if (!isSame && !main.querySelector(".failures summary:hover, .do button:hover")) paint();
    return found.now_ms;
  }
  let lastRead = 0, waiting = 0;
  const stop = follow("", async () => {
    try { return await load(); } catch (error) { if (error.status !== 400) throw error; status.textContent = error.message; return now(); }
  }, (event) => {
    if (!event.queues.length || waiting) return;
    waiting = setTimeout(() => { waiting = 0; load().catch((error) => { status.textContent = error.message; }); }, Math.max(0, lastRead + READ_MS - Date.now()));
  }, app.tell);
  return () => { clearTimeout(waiting); stop(); };
}
