// What the page asks the server, and the changes that the server pushes.
export class Failed extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function answered(path, options) {
  let reply;
  try {
    reply = await fetch(`/console/api/${path}`, { cache: "no-store", ...options });
  } catch {
    throw new Failed(0, "The server does not answer.");
  }
  const value = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Failed(reply.status, value.error || `The server answered ${reply.status}.`);
  return value;
}

export const read = (name, given = {}, signal) => answered(`${name}?${new URLSearchParams(given)}`, { signal });
export const change = (name, given) => answered(name, { method: "POST",
  headers: { "Content-Type": "application/json", "X-Penstock-Console": "1" }, body: JSON.stringify(given) });

// Follows the changes of one queue, or of all. `load` reads everything and `take` what changed since. While the
// page is hidden nothing is open; a connection that was lost is tried again, and everything is read again.
export function follow(queue, load, take, tell) {
  let source = null, retry = 0, ended = false, waiting = null, lastAt = 0;
  const address = `/console/api/events?${new URLSearchParams(queue ? { queue } : {})}`;

  async function loadAll() {
    waiting = [];
    try {
      lastAt = await load();
      tell("live");
      const late = waiting;
      waiting = null;
      for (const event of late) if (event.at_ms > lastAt) take(event);
    } catch (error) {
      if (ended) return;
      waiting = null;
      close();
      if (error.status === 403) tell("refused", error);
      else if (error.status === 404) tell("gone", error);
      else later(error);
    }
  }
  function open() {
    if (ended || document.hidden || source) return;
    clearTimeout(retry);
    source = new EventSource(address);
    source.onopen = () => { loadAll(); };
    source.onerror = () => { close(); later(new Failed(0, "The server does not answer.")); };
    source.addEventListener("behind", loadAll);
    source.onmessage = ({ data }) => {
      const event = JSON.parse(data);
      if (waiting) waiting.push(event); else take(event);
    };
  }
  function close() { source?.close(); source = null; }
  function later(error) {
    tell("lost", error);
    clearTimeout(retry);
    retry = setTimeout(open, 1000);
  }
  function visibility() {
    if (document.hidden) { clearTimeout(retry); close(); tell("paused"); } else open();
  }
  document.addEventListener("visibilitychange", visibility);
  open();
  return () => {
    ended = true;
    clearTimeout(retry);
    close();
    document.removeEventListener("visibilitychange", visibility);
  };
}
