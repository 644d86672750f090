"use strict";
// Draws the plots of report.html from the JSON in the page. No library, no network.
const DATA = JSON.parse(document.getElementById("data").textContent);
let paper = 0; // the width of a sheet while the page is printed
const HEIGHT = 340, LEFT = 52, RIGHT = 14, TOP = 12, BOTTOM = 42;

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "rect"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function bytesText(count) {
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (count >= unit) return `${+(count / unit).toPrecision(3)} ${name}`;
  return `${Math.round(count)} B`;
}

const short = (value) => `${+value.toPrecision(4)}`;

// Round numbers between low and high; whole ones only where `whole`.
function linearTicks(low, high, count, whole) {
  const rough = (high - low) / Math.max(count, 1) || 1, power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const m of high / low > 300 ? [1] : high / low > 30 ? [1, 3] : [1, 2, 5]) {
      const tick = +`${m}e${e}`;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  return ticks;
}

function scaleOf(low, high, from, to, log) {
  const map = log ? Math.log10 : (v) => v, a = map(low), span = map(high) - a || 1;
  return (value) => from + (to - from) * (map(value) - a) / span;
}

// One plot. lines: [{name, color, kind, x: [], y: [], spread, tip: (i) => [text]}]; options: titles, texts, log, ...
function draw(box, lines, options) {
  box.replaceChildren();
  lines = lines.filter((line) => line.x.length);
  if (!lines.length) return;
  const width = paper || Math.max(box.clientWidth, 280), xs = lines.flatMap((line) => line.x);
  const spread = (line, i) => (line.spread ? line.spread[i] : 0);
  const lows = lines.flatMap((line) => line.y.map((y, i) => y - spread(line, i)));
  const highs = lines.flatMap((line) => line.y.map((y, i) => y + spread(line, i)));
  const log = options.log && Math.min(...xs) > 0;
  const xLow = log ? Math.min(...xs) : 0, xHigh = Math.max(...xs) || 1;
  const pad = 0.05 * (Math.max(...highs) - Math.min(...lows)) || 0.01;
  const yLog = options.yLog && Math.min(...lows) > 0;
  const yLow = yLog ? 0.8 * Math.min(...lows) : Math.max(Math.min(...lows) - pad, options.floor ?? -Infinity);
  const yHigh = yLog ? 1.1 * Math.max(...highs) : Math.min(Math.max(...highs) + pad, options.top ?? Infinity);
  const x = scaleOf(xLow, xHigh, LEFT, width - RIGHT, log), y = scaleOf(yLow, yHigh, HEIGHT - BOTTOM, TOP, yLog);
  const svg = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${options.yTitle} against ${options.xTitle}` });
  const label = (text, attributes) => svg.append(element("text", attributes, text));
  for (const tick of yLog ? logTicks(yLow, yHigh) : linearTicks(yLow, yHigh, 6)) {
    svg.append(element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
    label(options.yText(tick), { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" });
  }
  const wanted = Math.max(2, Math.floor(width / 110));
  let ticks = log ? logTicks(xLow, xHigh) : linearTicks(xLow, xHigh, wanted, options.whole);
  while (ticks.length > 1.6 * wanted) ticks = ticks.filter((_, i) => i % 2 === 0);
  for (const tick of ticks) {
    svg.append(element("line", { class: "grid", x1: x(tick), x2: x(tick), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 5 }));
    label(options.xText(tick), { class: "xtick", x: x(tick), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" });
  }
  label(options.xTitle, { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" });
  const points = [];
  for (const line of lines) {
    const group = element("g", { class: "series", style: `--c:${line.color}`, "data-name": line.name });
    const at = (i, d = 0) => `${x(line.x[i]).toFixed(1)},${y(line.y[i] + d).toFixed(1)}`;
    if (line.spread) {
      const up = line.x.map((_, i) => at(i, line.spread[i])), down = line.x.map((_, i) => at(i, -line.spread[i]));
      group.append(element("path", { class: "band", d: `M${up.join("L")}L${down.reverse().join("L")}Z` }));
    }
    group.append(element("path", { class: line.kind, d: `M${line.x.map((_, i) => at(i)).join("L")}` }));
    if (options.dots && line.x.length <= 60) line.x.forEach((_, i) => group.append(dot(at(i), line.x.length > 25 ? 2.5 : 3.5)));
    line.x.forEach((_, i) => points.push({ line, i, px: x(line.x[i]), py: y(line.y[i]) }));
    svg.append(group);
  }
  box.append(element("div", { class: "note" }, options.yTitle), svg);
  hover(box, svg, points, width);
}

function dot(at, r) {
  const [cx, cy] = at.split(",");
  return element("circle", { cx, cy, r });
}

// The nearest point's values beside the pointer.
function hover(box, svg, points, width) {
  let tip = null, mark = null;
  const clear = () => { tip?.remove(); mark?.remove(); tip = mark = null; };
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect(), ratio = width / frame.width;
    const px = (event.clientX - frame.left) * ratio, py = (event.clientY - frame.top) * ratio;
    const distance = (p) => (p.px - px) ** 2 + (p.py - py) ** 2;
    const near = points.reduce((a, b) => (distance(b) < distance(a) ? b : a));
    clear();
    mark = element("g", { class: "series", style: `--c:${near.line.color}` }, dot(`${near.px},${near.py}`, 6));
    svg.append(mark);
    tip = element("div", { class: "tip", role: "status" }, element("b", {}, near.line.name));
    near.line.tip(near.i).forEach((text) => tip.append(element("div", {}, text)));
    box.append(tip);
    const top = frame.top - box.getBoundingClientRect().top + near.py / ratio, left = near.px / ratio;
    tip.style.left = `${Math.min(Math.max(left + 12, 0), box.clientWidth - tip.offsetWidth)}px`;
    tip.style.top = `${top > tip.offsetHeight + 14 ? top - tip.offsetHeight - 10 : top + 14}px`;
  });
}

function color(series) {
  return series.color === "#000000" ? "var(--fg)" : series.color;
}

function section(id, data) {
  const root = document.getElementById(id), controls = root.querySelector(".controls");
  const [main, bits] = root.querySelectorAll(".plot");
  const most = Math.max(...data.series.map((s) => s.bytes.at(-1))), least = Math.min(...data.series.map((s) => s.bytes.at(-1)));
  const state = { off: new Set(), axis: "bytes", scale: most > 6 * least ? "log" : "linear" };
  const percent = data.metric.percent, factor = percent ? 100 : 1;
  const valueText = (v) => (percent ? `${v.toFixed(1)} %` : short(v));

  function lineOf(s) {
    const tip = (i) => [
      `round ${s.round[i]}: ${data.metric.name} ${valueText(factor * s.value[i])}` + (s.spread ? ` ± ${(factor * s.spread[i]).toFixed(percent ? 1 : 4)}` : ""),
      `${bytesText(s.bytes[i])} sent` + (s.seeds > 1 ? ` (mean of ${s.seeds} seeds)` : ""),
    ];
    return { name: s.name, color: color(s), kind: "line", x: state.axis === "bytes" ? s.bytes : s.round,
             y: s.value.map((v) => factor * v), spread: s.spread && s.spread.map((v) => factor * v), tip };
  }

  function bitLines(s) {
    return ["down", "up"].map((way) => ({ name: `${s.name}, ${way}`, color: color(s), kind: way, x: s.bits.round, y: s.bits[way],
      tip: (i) => [`round ${s.bits.round[i]}: ${short(s.bits[way][i])} bits per weight`] }));
  }

  function redraw() {
    const shown = data.series.filter((s) => !state.off.has(s.label));
    const bytes = state.axis === "bytes";
    draw(main, shown.map(lineOf), {
      xTitle: bytes ? "bytes sent, both directions" : "round", yTitle: `test ${data.metric.title}`, log: state.scale === "log",
      dots: true, whole: !bytes, xText: bytes ? bytesText : short, yText: short, top: percent ? 100 : undefined, floor: percent ? 0 : undefined,
    });
    draw(bits, shown.flatMap(bitLines), {
      xTitle: "round", yTitle: "bits per weight in each message (down: solid, up: dashed)", yLog: true, whole: true,
      xText: short, yText: short,
    });
  }

  for (const s of data.series) {
    const box = element("input", { type: "checkbox", checked: "", "data-label": s.label });
    box.addEventListener("change", () => { state.off[box.checked ? "delete" : "add"](s.label); redraw(); });
    controls.append(element("label", {}, box, element("span", { class: "key", style: `--c:${color(s)}` }), s.name + (s.learned ? "" : " (not learned yet)")));
  }
  const axes = element("span", { class: "axes" });
  for (const [key, choices] of [["axis", ["bytes", "rounds"]], ["scale", ["linear", "log"]]]) {
    const select = element("select", { "data-key": key, "aria-label": key }, ...choices.map((name) => element("option", {}, name)));
    select.value = state[key];
    select.addEventListener("change", () => { state[key] = select.value; redraw(); });
    axes.append(element("label", {}, key, select));
  }
  controls.append(axes);
  redraw();
  return redraw;
}

const redraws = Object.entries(DATA).map(([id, data]) => section(id, data));
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraws.forEach((f) => f()); } });
for (const [event, sheet] of [["beforeprint", 700], ["afterprint", 0]])
  addEventListener(event, () => { paper = sheet; redraws.forEach((f) => f()); });
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
});
