// The frame of the console: which page is shown, the keys, the theme, and who is signed in.
import { make } from "./draw.js";
import { queuesPage } from "./queues.js";
import { queuePage } from "./queue.js";
import { messagePage } from "./message.js";
import { deadPage } from "./dead.js";
import { tasksPage } from "./tasks.js";
import { clusterPage } from "./cluster.js";
import { change, read } from "./server.js";
import { alertNode, dialog, link } from "./parts.js";

const by = (id) => document.getElementById(id);
const main = by("main");
const PAGES = [
  { name: "Queues", hash: "#/", key: "q" },
  { name: "Dead letters", hash: "#/dead", key: "d" },
  { name: "Tasks", hash: "#/tasks", key: "t" },
  { name: "Cluster", hash: "#/cluster", key: "c", isFor: (session) => session.has_cluster },
];
const ROUTES = [
  [/^#\/queue\/([^/]+)$/, (found) => [queuePage, decodeURIComponent(found[1])]],
  [/^#\/message\/([^/]+)\/([^/]+)$/, (found) => [messagePage, decodeURIComponent(found[1]), decodeURIComponent(found[2])]],
  [/^#\/dead(?:\/([^/]+))?$/, (found) => [deadPage, found[1] && decodeURIComponent(found[1])]],
  [/^#\/tasks$/, () => [tasksPage]],
  [/^#\/cluster$/, () => [clusterPage]],
  [/^(#\/?)?$/, () => [queuesPage]],
];
const app = { session: null, tell };
let leave = () => {};

function tell(state, error) {
  const shown = { live: ["live", "Live"], lost: ["lost", "No connection"], paused: ["", ""], refused: ["lost", "Refused"], gone: ["", ""] };
  const [kind, text] = shown[state];
  by("link").className = kind;
  if (by("link").textContent !== text) by("link").textContent = text;
  by("link").title = error ? error.message : "";
  document.body.classList.toggle("is-stale", state === "lost");
  if (state === "refused") start();
}

function show(isMoved = false) {
  leave();
  leave = () => {};
  let route;
  try {
    for (const [pattern, made] of ROUTES) {
      const found = pattern.exec(location.hash);
      if (found) { route = made(found); break; }
    }
  } catch { /* a name that cannot be decoded: no page has it */ }
  for (const each of by("nav").children) {
    const own = each.getAttribute("href");
    if (own === "#/" ? !/^#\/(?!$|queue\/|message\/)./.test(location.hash) : location.hash.startsWith(own)) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  main.replaceChildren();
  scrollTo(0, 0);
  // Who hears the page is at its beginning, and who types is not in what is gone.
  if (document.activeElement !== document.body || isMoved) main.focus({ preventScroll: true });
  if (!route) {
    document.title = "Penstock";
    main.append(alertNode("There is no such page."), make("p", {}, link("#/", "All queues")));
    return;
  }
  const [page, ...given] = route;
  leave = page(main, app, ...given) || (() => {});
}

function signIn() {
  document.title = "Sign in · Penstock";
  const key = make("input", { name: "key", autocomplete: "username", required: "", spellcheck: "false", autocapitalize: "none" });
  const secret = make("input", { name: "secret", type: "password", autocomplete: "current-password", required: "" });
  const wrong = make("p", { class: "wrong", role: "alert" });
  const form = make("form", { class: "card sign-in", on: { async submit(event) {
    event.preventDefault();
    wrong.textContent = "";
    try {
      await change("sign-in", { key: key.value, secret: secret.value });
      start();
    } catch (error) { wrong.textContent = error.message; secret.value = ""; secret.focus(); }
  } } },
  make("h1", { text: "Sign in" }),
  make("p", { class: "soft", text: "This server checks keys. Sign in with one of them: its id and its secret." }),
  make("label", {}, make("span", { text: "Access key" }), key),
  make("label", {}, make("span", { text: "Secret" }), secret), wrong,
  make("button", { class: "primary", text: "Sign in" }));
  main.replaceChildren(form);
  key.focus();
}

async function start() {
  leave();
  leave = () => {};
  try {
    app.session = await read("session");
  } catch (error) {
    tell("lost", error);
    setTimeout(start, 1500);
    return;
  }
  const session = app.session;
  by("nav").hidden = !session.may_look;
  by("nav").replaceChildren(...pages().map((each) => make("a", { href: each.hash, text: each.name })));
  const who = by("who");
  who.replaceChildren();
  if (session.key) {
    who.append(make("button", { type: "button", class: "quiet", title: `Signed in with ${session.key}`, text: "Sign out", on: { async click() {
      await change("sign-out", {});
      start();
    } } }));
  } else if (session.may_look && !session.may_change) {
    who.append(make("span", { class: "tag", text: "Read-only", title: "This server can be reached from other machines and has no keys: nothing can be changed here." }));
  }
  if (session.kill_button && session.may_change) who.append(killButton());
  if (session.may_look) show(); else signIn();
}

// For `penstock demo`: the server ends without a word, and the demo starts it again.
function killButton() {
  const button = make("button", { type: "button", class: "danger", id: "kill", text: "kill -9 the server", title: "Ends the server by SIGKILL, under load; the demo starts it again", on: { async click() {
    button.disabled = true;
    try { await change("kill-server", {}); } catch { /* it cannot answer any more */ }
    setTimeout(() => { button.disabled = false; }, 3000);
  } } });
  return button;
}

const KEYS = [
  ["/", "search"], ["j, k or ↓, ↑", "next and previous row"], ["Enter", "open"], ["g then a letter", ""],
  ["x", "select the row, or end that"], ["u", "up: to all queues"], ["Esc", "close, or end a search"], ["?", "this list"],
];
const pages = () => PAGES.filter((each) => !each.isFor || (app.session && each.isFor(app.session)));
// A button that has a key of its own says so with `data-key`.
const ownKeys = () => [...main.querySelectorAll("[data-key]")].filter((each) => each.offsetParent !== null && !each.disabled);
function showKeys() {
  const list = (keys) => make("dl", { class: "keys" }, ...keys.flatMap(([key, what]) => [make("dt", {}, make("kbd", { text: key })), make("dd", { text: what })]));
  const everywhere = KEYS.map(([key, what]) => [key, what || pages().map((each) => `${each.key}: ${each.name.toLowerCase()}`).join(", ")]);
  const own = ownKeys().map((each) => [each.dataset.key, (each.getAttribute("aria-label") || each.textContent).toLowerCase()]);
  dialog("Keys", ...(own.length ? [make("h3", { text: "On this page" }), list(own), make("h3", { text: "Everywhere" })] : []), list(everywhere));
}

let prefix = false;
function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const inField = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (inField) return;
  const page = prefix && pages().find((each) => each.key === event.key);
  prefix = event.key === "g";
  const search = document.querySelector("input[type=search]");
  if (page) location.hash = page.hash;
  else if (event.key === "/" && search) { event.preventDefault(); search.focus(); search.select(); }
  else if (event.key === "?") showKeys();
  else if (event.key === "u") location.hash = "#/";
  else if (event.key === "x") event.target.closest?.("[data-row]")?.querySelector("input[type=checkbox]")?.click();
  else if (["j", "k", "ArrowDown", "ArrowUp"].includes(event.key)) {
    const rows = [...main.querySelectorAll("[data-row]")].filter((each) => each.offsetParent !== null);
    if (!rows.length || event.target.closest("[role=group]")) return;
    const at = rows.indexOf(document.activeElement.closest("[data-row]") || undefined);
    const next = rows[Math.max(0, Math.min(rows.length - 1, at + (/j|Down/.test(event.key) ? 1 : -1)))];
    event.preventDefault();
    (next.matches("a, button, [tabindex]") ? next : next.querySelector("summary, a, button") || next).focus();
  } else {
    const own = ownKeys().find((each) => each.dataset.key === event.key);
    if (own) { event.preventDefault(); own.click(); }
  }
}

function theme() {
  const button = by("theme"), root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  const showMode = () => {
    button.textContent = isDark() ? "☀" : "☾";
    button.setAttribute("aria-pressed", String(isDark()));
    button.title = isDark() ? "Light" : "Dark";
  };
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
by("keys").addEventListener("click", showKeys);
addEventListener("keydown", keys);
addEventListener("hashchange", () => { if (app.session?.may_look) show(true); });
// The address has the page that is shown: a link to a place in it would lead to another one.
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
start();
