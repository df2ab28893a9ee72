// Draws with SVG, and writes numbers and times for people. The console's modules import it; the report, which
// is one file, contains it. Text from outside reaches a page only through `textContent` and attributes that
// hold no code.
export const SVG = "http://www.w3.org/2000/svg";
export const SECOND = 1e3, MINUTE = 6e4, HOUR = 36e5, DAY = 864e5;

export function make(tag, options = {}, ...children) {
  const node = options.svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [kind, act] of Object.entries(value)) node.addEventListener(kind, act);
    else if (name !== "svg" && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
export const draw = (tag, options, ...children) => make(tag, { svg: true, ...options }, ...children);

export const count = (n) => Math.round(n).toLocaleString("en");
export const few = (n) => n < 1e4 ? count(n) : n < 1e6 ? trim(n / 1e3) + "k" : trim(n / 1e6) + "M";
export const trim = (n) => n.toFixed(n < 10 ? 1 : 0).replace(/\.0$/, "");
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
export const percent = (n, of) => of ? (100 * n / of).toFixed(n && n / of < 0.01 ? 2 : 1) + " %" : "–";
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < SECOND) return `${Math.round(ms)} ms`;
  if (ms < MINUTE) return `${trim(ms / SECOND)} s`;
  const units = [["d", DAY], ["h", HOUR], ["m", MINUTE], ["s", SECOND]];
  const at = units.findIndex(([, size]) => ms >= size);
  const [unit, size] = units[at], [part, small] = units[at + 1];
  const rest = Math.floor((ms % size) / small);
  return `${Math.floor(ms / size)} ${unit}` + (rest ? ` ${rest} ${part}` : "");
}
export const about = (ms) => ms < MINUTE ? duration(ms) : ms < HOUR ? `${trim(ms / MINUTE)} m`
  : ms < DAY ? `${trim(ms / HOUR)} h` : `${trim(ms / DAY)} d`;
export const bytes = (n) => n < 1024 ? `${n} B` : n < 1048576 ? `${trim(n / 1024)} KiB` : n < 1073741824
  ? `${trim(n / 1048576)} MiB` : `${trim(n / 1073741824)} GiB`;
export const iso = (ms) => new Date(ms).toISOString();
export const day = (ms) => iso(ms).slice(0, 10);
export const clock = (ms, step) => iso(ms).slice(11, step < MINUTE ? 19 : 16);
export const moment = (ms, step = SECOND) => `${day(ms)} ${clock(ms, step)}`;

// The tip is made when it is first shown, so that a page needs no place for it.
let tip;
function tipNode() {
  tip ??= document.body.appendChild(make("div", { id: "tip", role: "status", "aria-live": "polite", hidden: "" }));
  return tip;
}
export function showTip(x, y, ...lines) {
  const tip = tipNode();
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? Math.max(4, x - box.width - 14) : x + 14;
  const top = y + 14 + box.height > innerHeight ? Math.max(4, y - box.height - 14) : y + 14;
  tip.style.transform = `translate(${left}px, ${top}px)`;
}
export const hideTip = () => { if (tip) tip.hidden = true; };
export function tipLine(kind, name, value) {
  const line = make("div", {}, make("span", { text: name }), make("span", { text: value }));
  if (kind) line.prepend(make("i", { class: `swatch ${kind}` }));
  return line;
}

// Calls `paint(width)` now and whenever the node's width changes.
export function atEveryWidth(node, paint) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(node.clientWidth);
    if (width && width !== last) { last = width; paint(width); }
  }).observe(node);
}

export const COUNT_STEPS = [1, 2, 5];
export const TIME_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, ...[1, 2, 5, 10, 15, 30].map((n) => n * SECOND),
  ...[1, 2, 5, 10, 15, 30].map((n) => n * MINUTE), ...[1, 2, 3, 4, 6, 12].map((n) => n * HOUR)];
export function ticks(most, wanted, isTime) {
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
export function timeTicks(from, to, wanted) {
  const span = Math.max(1, to - from);
  const step = TIME_STEPS.filter((s) => s >= SECOND).find((s) => span / s <= wanted)
    || DAY * Math.ceil(span / DAY / wanted);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return { step, found };
}
export const tickLabel = (at, step) => step >= DAY || at % DAY === 0 ? day(at).slice(5) : clock(at, step);

// Several lines over time, with one crosshair that follows the pointer or the arrow keys. Returns a function
// that draws other values of the same lines, for a chart that goes on.
export function lineChart(node, name, series, format, isTime, time) {
  let { from_ms: from, step_ms: step, points, to_ms: to } = time;
  const when = (at) => Math.min(to, from + (at + 1) * step);
  const hidden = new Set();
  let at = null;
  const legend = make("div", { class: "legend" });
  const frame = make("div", { class: "card", tabindex: 0, role: "group",
    "aria-label": `${name} over time; the arrow keys move along it` });
  node.append(legend, frame);
  if (!series.length) { frame.append(make("p", { class: "empty", text: "Nothing happened yet." })); return () => {}; }
  const lasts = series.map((each) => {
    const last = make("b", { text: format(each.values[points - 1]) });
    legend.append(make("button", { type: "button", "aria-pressed": "true", title: each.name, on: {
      click(event) {
        const button = event.currentTarget;
        if (!hidden.delete(each)) hidden.add(each);
        button.setAttribute("aria-pressed", String(!hidden.has(each)));
        paint(frame.clientWidth);
      } } },
    make("i", { class: `swatch ${each.kind}` }), make("span", { text: each.name }),
    last));
    return last;
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
      const apart = (right - left) * marks.step / Math.max(1, when(points - 1) - when(0));
      // The last label ends at the chart's edge, and would run into the one before.
      if (place > right - 20 && apart < 100) return;
      root.append(draw("text", { x: place, y: height - 6, "text-anchor": place > right - 20 ? "end" : "middle",
        text: tickLabel(ms, marks.step) }));
    });
    shown.forEach((each) => {
      const path = each.values.map((v, i) => `${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("L");
      // One area: two over each other have a colour that is neither.
      if (shown.length < 3 && each === shown[0]) root.append(draw("path", { class: `area ${each.kind}`,
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
  return (columns, time) => {
    ({ from_ms: from, step_ms: step, points, to_ms: to } = time);
    series.forEach((each, i) => {
      each.values = columns[i];
      lasts[i].textContent = format(each.values[points - 1]);
    });
    // Not under the eyes of somebody who reads a point of it.
    if (at === null && frame.clientWidth) paint(frame.clientWidth);
  };
}

// Names that are alike differ at their ends, so the middle goes.
export const shorten = (name, chars) => name.length <= chars ? name
  : name.slice(0, Math.ceil(chars / 3)) + "…" + name.slice(name.length - (chars - Math.ceil(chars / 3) - 1));

// Rows of cells, each as strongly coloured as it was busy.
export function heatMap(node, map, what) {
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

export const DECADE = 6;  // bins of the histogram in a power of ten
export function histogram(node, bins, samples) {
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
