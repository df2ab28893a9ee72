"use strict";
// Draws the report from the JSON that stands before this script. Text from the lake reaches the page
// only through `textContent` and attributes that hold no code.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const SECOND = 1e3, MINUTE = 6e4, HOUR = 36e5, DAY = 864e5;

  function make(tag, options = {}, ...children) {
    const node = options.svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (name === "text") node.textContent = value;
      else if (name === "on") for (const [kind, act] of Object.entries(value)) node.addEventListener(kind, act);
      else if (name !== "svg" && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }
  const draw = (tag, options, ...children) => make(tag, { svg: true, ...options }, ...children);

  const count = (n) => Math.round(n).toLocaleString("en");
  const few = (n) => n < 1e4 ? count(n) : n < 1e6 ? trim(n / 1e3) + "k" : trim(n / 1e6) + "M";
  const trim = (n) => n.toFixed(n < 10 ? 1 : 0).replace(/\.0$/, "");
  const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
  const percent = (n, of) => of ? (100 * n / of).toFixed(n && n / of < 0.01 ? 2 : 1) + " %" : "–";
  function duration(ms) {
    if (ms === null || ms === undefined) return "–";
    if (ms < SECOND) return `${Math.round(ms)} ms`;
    if (ms < MINUTE) return `${trim(ms / SECOND)} s`;
    const units = [["d", DAY], ["h", HOUR], ["m", MINUTE], ["s", SECOND]];
    const at = units.findIndex(([, size]) => ms >= size);
    const [unit, size] = units[at], [part, small] = units[at + 1];
    const rest = Math.floor((ms % size) / small);
    return `${Math.floor(ms / size)} ${unit}` + (rest ? ` ${rest} ${part}` : "");
  }
  const about = (ms) => ms < MINUTE ? duration(ms) : ms < HOUR ? `${trim(ms / MINUTE)} m`
    : ms < DAY ? `${trim(ms / HOUR)} h` : `${trim(ms / DAY)} d`;
  const bytes = (n) => n < 1024 ? `${n} B` : n < 1048576 ? `${trim(n / 1024)} KiB` : n < 1073741824
    ? `${trim(n / 1048576)} MiB` : `${trim(n / 1073741824)} GiB`;
  const iso = (ms) => new Date(ms).toISOString();
  const day = (ms) => iso(ms).slice(0, 10);
  const clock = (ms, step) => iso(ms).slice(11, step < MINUTE ? 19 : 16);
  const moment = (ms, step = SECOND) => `${day(ms)} ${clock(ms, step)}`;

  const tip = by("tip");
  function showTip(x, y, ...lines) {
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? Math.max(4, x - box.width - 14) : x + 14;
    const top = y + 14 + box.height > innerHeight ? Math.max(4, y - box.height - 14) : y + 14;
    tip.style.transform = `translate(${left}px, ${top}px)`;
  }
  const hideTip = () => { tip.hidden = true; };
  function tipLine(kind, name, value) {
    const line = make("div", {}, make("span", { text: name }), make("span", { text: value }));
    if (kind) line.prepend(make("i", { class: `swatch ${kind}` }));
    return line;
  }

  // Calls `paint(width)` now and whenever the node's width changes.
  function atEveryWidth(node, paint) {
    let last = 0;
    new ResizeObserver(() => {
      const width = Math.floor(node.clientWidth);
      if (width && width !== last) { last = width; paint(width); }
    }).observe(node);
  }

  const COUNT_STEPS = [1, 2, 5];
  const TIME_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, ...[1, 2, 5, 10, 15, 30].map((n) => n * SECOND),
    ...[1, 2, 5, 10, 15, 30].map((n) => n * MINUTE), ...[1, 2, 3, 4, 6, 12].map((n) => n * HOUR)];
  function ticks(most, wanted, isTime) {
    let step;
    if (isTime && most / wanted <= DAY / 2) step = TIME_STEPS.find((each) => most / each <= wanted);
    else {
      const unit = isTime ? DAY : 1;
      const scale = Math.max(1, 10 ** Math.floor(Math.log10(most / unit / wanted)));
      step = unit * scale * ([...COUNT_STEPS, 10].find((each) => most / unit / (each * scale) <= wanted) || 10);
    }
    const found = [];
    for (let at = 0; at < most + step; at += step) found.push(at);
    return found;
  }
  function timeTicks(from, to, wanted) {
    const span = Math.max(1, to - from);
    const step = TIME_STEPS.filter((s) => s >= SECOND).find((s) => span / s <= wanted)
      || DAY * Math.ceil(span / DAY / wanted);
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
    return { step, found };
  }
  const tickLabel = (at, step) => step >= DAY || at % DAY === 0 ? day(at).slice(5) : clock(at, step);

  // Several lines over time, with one crosshair that follows the pointer or the arrow keys.
  function lineChart(node, name, series, format, isTime) {
    const { from_ms: from, step_ms: step, points, to_ms: to } = data.time;
    const when = (at) => Math.min(to, from + (at + 1) * step);
    const hidden = new Set();
    let at = null;
    const legend = make("div", { class: "legend" });
    const frame = make("div", { class: "card", tabindex: 0, role: "group",
      "aria-label": `${name} over time; the arrow keys move along it` });
    node.append(legend, frame);
    if (!series.length) { frame.append(make("p", { class: "empty", text: "Nothing happened yet." })); return; }
    series.forEach((each) => {
      const last = each.values[points - 1];
      legend.append(make("button", { type: "button", "aria-pressed": "true", title: each.name, on: {
        click(event) {
          const button = event.currentTarget;
          if (!hidden.delete(each)) hidden.add(each);
          button.setAttribute("aria-pressed", String(!hidden.has(each)));
          paint(frame.clientWidth);
        } } },
      make("i", { class: `swatch ${each.kind}` }), make("span", { text: each.name }),
      make("b", { text: format(last) })));
    });

    function paint(full) {
      const style = getComputedStyle(frame);
      const width = full - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      const height = width < 500 ? 190 : 250;
      const shown = series.filter((each) => !hidden.has(each));
      const most = Math.max(1, ...shown.flatMap((each) => each.values));
      const lines = ticks(most, 4, isTime);
      const top = lines[lines.length - 1];
      const left = 14 + 7 * Math.max(...lines.map((v) => format(v, true).length));
      const bottom = height - 24, right = width - 10;
      const x = (i) => points < 2 ? (left + right) / 2 : left + (right - left) * i / (points - 1);
      const y = (v) => bottom - (bottom - 10) * v / top;
      const root = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
        "aria-label": `${name}: ` + shown.map((s) => `${s.name} ends at ${format(s.values[points - 1])}`).join(", ") });
      lines.forEach((v) => {
        root.append(draw("line", { class: "grid", x1: left, x2: right, y1: y(v), y2: y(v) }));
        root.append(draw("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end", text: format(v, true) }));
      });
      const marks = timeTicks(when(0), when(points - 1), Math.max(2, Math.floor(width / 90)));
      marks.found.forEach((ms) => {
        const place = left + (right - left) * (ms - when(0)) / Math.max(1, when(points - 1) - when(0));
        root.append(draw("text", { x: place, y: height - 6, "text-anchor": place > right - 20 ? "end" : "middle",
          text: tickLabel(ms, marks.step) }));
      });
      shown.forEach((each) => {
        const path = each.values.map((v, i) => `${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("L");
        if (shown.length < 3) root.append(draw("path", { class: `area ${each.kind}`,
          d: `M${x(0)} ${bottom}L${path}L${x(points - 1)} ${bottom}Z` }));
        root.append(points > 1 ? draw("path", { class: `curve ${each.kind}`, d: `M${path}` })
          : draw("circle", { class: `point ${each.kind}`, cx: x(0), cy: y(each.values[0]), r: 3.5 }));
      });
      const cross = draw("g", { visibility: "hidden" });
      root.append(cross);
      frame.replaceChildren(root);

      function point(i, pageX, pageY) {
        at = Math.max(0, Math.min(points - 1, i));
        const box = root.getBoundingClientRect();
        cross.replaceChildren(draw("line", { class: "cross", x1: x(at), x2: x(at), y1: 8, y2: bottom }),
          ...shown.map((s) => draw("circle",
            { class: `point ${s.kind}`, cx: x(at), cy: y(s.values[at]), r: 3.5 })));
        cross.setAttribute("visibility", "visible");
        const order = [...shown].sort((a, b) => b.values[at] - a.values[at]);
        showTip(pageX ?? box.left + x(at), pageY ?? box.top + 20, make("b", { text: moment(when(at)) }),
          ...order.map((s) => tipLine(s.kind, s.name, format(s.values[at]))));
      }
      function leave() { cross.setAttribute("visibility", "hidden"); hideTip(); at = null; }
      root.addEventListener("pointermove", (event) => {
        const inside = event.clientX - root.getBoundingClientRect().left - left;
        point(Math.round(inside / Math.max(1, right - left) * (points - 1)), event.clientX, event.clientY);
      });
      root.addEventListener("pointerleave", leave);
      frame.onblur = leave;
      frame.onkeydown = (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -points, End: points }[event.key];
        if (event.key === "Escape") leave();
        if (move === undefined) return;
        event.preventDefault();
        point((at ?? (move > 0 ? -1 : points)) + move);
      };
    }
    atEveryWidth(frame, paint);
  }

  // Names that are alike differ at their ends, so the middle goes.
  const shorten = (name, chars) => name.length <= chars ? name
    : name.slice(0, Math.ceil(chars / 3)) + "…" + name.slice(name.length - (chars - Math.ceil(chars / 3) - 1));

  // Rows of cells, each as strongly coloured as it was busy.
  function heatMap(node, map, what) {
    const frame = make("div", { class: "card", tabindex: 0, role: "group",
      "aria-label": `${what}: ${map.rows.length} rows; the arrow keys move among the cells` });
    node.append(frame);
    if (!map.rows.length) { frame.append(make("p", { class: "empty", text: "Nothing happened yet." })); return; }
    const most = Math.max(1, ...map.rows.flatMap((row) => row.cells));
    // Counts span decades, so the shades follow their root; what is there at all is never blank.
    const shade = (v) => v ? Math.max(1, Math.ceil(6 * Math.sqrt(v / most))) : 0;
    const columns = map.rows[0].cells.length;
    atEveryWidth(frame, (full) => {
      const style = getComputedStyle(frame);
      const width = full - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      const left = Math.min(190, width * 0.3), rowHeight = 23, right = width - 52;
      const height = rowHeight * map.rows.length + 22, size = (right - left) / columns;
      const root = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
        "aria-label": `${what}: ` + map.rows.map((r) => `${r.name} ${count(r.total)}`).join(", ") });
      const chars = Math.floor(left / 7.2);
      map.rows.forEach((row, j) => {
        const label = shorten(row.name, chars);
        root.append(draw("text", { x: 0, y: j * rowHeight + 15, text: label }));
        root.append(draw("text", { x: width, y: j * rowHeight + 15, "text-anchor": "end", text: few(row.total) }));
        row.cells.forEach((v, i) => root.append(draw("rect", { class: `h${shade(v)}`, x: (left + i * size).toFixed(2),
          y: j * rowHeight, width: Math.max(1, size - (size > 4 ? 1 : 0)).toFixed(2), height: rowHeight - 3,
          rx: size > 6 ? 2 : 0 })));
      });
      const end = map.from_ms + columns * map.step_ms;
      const marks = timeTicks(map.from_ms, end, Math.max(2, Math.floor((right - left) / 90)));
      marks.found.forEach((ms) => root.append(draw("text", { y: height - 4, "text-anchor": "middle",
        x: left + (right - left) * (ms - map.from_ms) / (end - map.from_ms), text: tickLabel(ms, marks.step) })));
      const focus = draw("rect", { class: "cell-focus", width: size, height: rowHeight - 2, visibility: "hidden" });
      root.append(focus);
      frame.replaceChildren(root);
      let place = null;
      function point(i, j, pageX, pageY) {
        place = [Math.max(0, Math.min(columns - 1, i)), Math.max(0, Math.min(map.rows.length - 1, j))];
        const [column, line] = place, row = map.rows[line], box = root.getBoundingClientRect();
        const x = left + column * size, y = line * rowHeight;
        for (const [name, value] of [["x", x - 1], ["y", y - 1], ["visibility", "visible"]]) focus.setAttribute(name, value);
        showTip(pageX ?? box.left + x + size, pageY ?? box.top + y, make("b", { text: row.name }),
          tipLine("", moment(map.from_ms + column * map.step_ms, MINUTE) + ", " + duration(map.step_ms), count(row.cells[column])));
      }
      function leave() { focus.setAttribute("visibility", "hidden"); hideTip(); place = null; }
      root.addEventListener("pointermove", (event) => {
        const box = root.getBoundingClientRect();
        const i = Math.floor((event.clientX - box.left - left) / size), j = Math.floor((event.clientY - box.top) / rowHeight);
        if (i < 0 || i >= columns || j < 0 || j >= map.rows.length) leave();
        else point(i, j, event.clientX, event.clientY);
      });
      root.addEventListener("pointerleave", leave);
      frame.onblur = leave;
      frame.onkeydown = (event) => {
        const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
        if (event.key === "Escape") leave();
        if (!move) return;
        event.preventDefault();
        point((place ? place[0] : -1) + move[0], (place ? place[1] : 0) + move[1]);
      };
    });
    if (map.more) node.append(make("p", { class: "more", text: `and ${count(map.more)} more` }));
  }

  const DECADE = 6;  // bins of the histogram in a power of ten
  function histogram(node, bins, samples) {
    const frame = make("div", { class: "card" });
    node.append(frame);
    if (!samples) { frame.append(make("p", { class: "empty", text: "No sample yet." })); return; }
    const first = Math.min(...bins.map(([bin]) => bin)), last = Math.max(...bins.map(([bin]) => bin));
    const low = Math.floor(first / DECADE) * DECADE, high = Math.max(low + DECADE, (Math.floor(last / DECADE) + 1) * DECADE);
    const most = Math.max(...bins.map(([, n]) => n));
    const edge = (bin) => 10 ** (bin / DECADE);
    atEveryWidth(frame, (full) => {
      const style = getComputedStyle(frame);
      const width = full - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight), height = 150;
      const bottom = height - 22, size = width / (high - low);
      const root = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
        "aria-label": `How ${count(samples)} samples are spread, from ${about(edge(first))} to ${about(edge(last + 1))}` });
      for (let bin = low; bin <= high; bin += DECADE) {
        const x = (bin - low) * size;
        root.append(draw("line", { class: "grid", x1: x, x2: x, y1: 0, y2: bottom }));
        root.append(draw("text", { x, y: height - 5, text: about(edge(bin)),
          "text-anchor": bin === low ? "start" : bin === high ? "end" : "middle" }));
      }
      bins.forEach(([bin, n]) => {
        const tall = Math.max(1.5, (bottom - 8) * n / most);
        const bar = draw("rect", { class: "bar-fill", x: (bin - low) * size + 1, width: Math.max(1, size - 2),
          y: bottom - tall, height: tall, rx: Math.min(3, size / 4) });
        const back = draw("rect", { x: (bin - low) * size, width: size, y: 0, height: bottom, fill: "transparent" });
        back.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY,
          make("b", { text: `${bin ? about(edge(bin)) : "0"} to ${about(edge(bin + 1))}` }),
          tipLine("", plural(n, "sample"), percent(n, samples))));
        back.addEventListener("pointerleave", hideTip);
        root.append(bar, back);
      });
      frame.replaceChildren(root);
    });
  }

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
    (v, short) => short ? few(v) : count(v), false);
  lineChart(by("age"), "Age", data.depth.map((each, i) => ({ name: named(each), kind: kindOf(each, i), values: each.age_ms.map((v) => v ?? 0) })),
    (v, short) => v ? duration(v) : short ? "0" : "empty", true);
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
})();
