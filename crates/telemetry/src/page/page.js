"use strict";
(() => {
const embedded = JSON.parse(document.getElementById("data").textContent);
const token = new URLSearchParams(location.search).get("token");
const $ = (id) => document.getElementById(id);
const COLORS = ["#2f7ed8", "#e0662b", "#2a9d5c", "#a259c4", "#c8374a", "#8a6d1f", "#128c9c", "#d6469b"];
const CLASSES = { parameters: "#2f7ed8", gradients: "#e0662b", optimizer: "#2a9d5c", activations: "#a259c4", workspace: "#8a6d1f", communication: "#128c9c" };
const EVENTS = { checkpoint: "#8a94a0", skipped: "#c8374a", roll_back: "#7a1fa2", start: "#2a9d5c", interrupt: "#e0662b", finish: "#2a9d5c", change: "#a259c4", set_aside: "#a259c4", slow_rank: "#8a6d1f", world: "#e0662b", cross_check: "#c8374a", checkpoint_failed: "#c8374a", mirror_failed: "#c8374a", sink_failed: "#c8374a", metrics_gap: "#c8374a" };
/** Which keys stand in a chart together, in this order; every other key has a chart of its own. */
const CHARTS = [
  { title: "Loss", keys: ["loss", "val_loss"], log: true, events: true },
  { title: "Gradient norm", keys: ["grad_norm"], log: true, events: true },
  { title: "Loss in bf16 and fp8", keys: ["shadow_loss_bf16", "shadow_loss_fp8"], log: true, events: true },
  { title: "Loss in fp8: difference from bf16", keys: ["shadow_difference"], percent: true },
  { title: "fp8: elements that became 0", match: /^fp8_underflow\//, percent: true, log: true },
  { title: "fp8: elements too large for their scale", match: /^fp8_overflow\//, percent: true, log: true },
  { title: "Learning rate", keys: ["lr"] },
  { title: "Throughput", keys: ["tokens_per_s"] },
  { title: "MFU", keys: ["mfu"], percent: true },
  { title: "Goodput", keys: ["goodput"], percent: true },
  { title: "Step time", keys: ["step_s", "data_wait_s"], predicted: true },
  { title: "Memory", keys: ["arena_bytes", "gpu_memory_bytes"], bytes: true },
  { title: "Power", keys: ["power_w", "gpu_power_w"] },
  { title: "Energy per step", keys: ["gpu_energy_j", "cpu_energy_j"] },
  { title: "Energy per token", keys: ["energy_per_token_j"] },
  { title: "Energy of the run", keys: ["energy_kwh"] },
  { title: "GPU utilisation", keys: ["gpu_utilisation_percent"] },
  { title: "GPU temperature", keys: ["gpu_temperature_c"] },
  { title: "Compute time per rank", match: /^rank_busy_s\// },
  { title: "Slowest rank", keys: ["slowest_rank"] },
  { title: "Tasks: accuracy", match: /^tasks\/.*\/acc/ , percent: true },
  { title: "Tasks: perplexity", match: /^tasks\/.*\/perplexity$/, log: true },
];
const HIDDEN = new Set(["step", "tokens"]);
/** Keys that are not smoothed; of these some have few values, and are drawn with points. */
const exact = (key) => sparse(key) || key === "lr" || key === "slowest_rank" || key.endsWith("_bytes") || key === "loss_scale";
const sparse = (key) => key === "val_loss" || key.startsWith("tasks/") || key.startsWith("shadow_");

let runs = [], units = {}, charts = [], view = null, shown = [], series = null, pending = false, again = false;
let smoothing = 0, log = false;

// ---- numbers -----------------------------------------------------------------------------------
const SI = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
const digits = (x) => { const a = Math.abs(x); return a === 0 ? "0" : a < 1e-3 || a >= 1e6 ? x.toExponential(3) : String(+x.toPrecision(5)); };
const count = (x) => { for (const [size, name] of SI) if (Math.abs(x) >= size) return +(x / size).toPrecision(3) + name; return digits(x); };
const flops = (x) => { for (const [size, name] of [[1e15, "P"], [1e12, "T"], [1e9, "G"]]) if (x >= size) return +(x / size).toPrecision(3) + " " + name + "FLOP/s"; return digits(x) + " FLOP/s"; };
const bytes = (x) => { const names = ["B", "KiB", "MiB", "GiB", "TiB"]; let i = 0; while (Math.abs(x) >= 1024 && i < 4) { x /= 1024; i++; } return +x.toPrecision(4) + " " + names[i]; };
const seconds = (s) => s < 1e-3 ? +(s * 1e6).toPrecision(3) + " µs" : s < 1 ? +(s * 1e3).toPrecision(3) + " ms" : s < 120 ? +s.toPrecision(3) + " s" : s < 7200 ? Math.round(s / 60) + " min" : s < 172800 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " days";
/** A field of an event: its name says the unit. */
const told = ([key, value]) => {
  if (typeof value !== "number") return key.replaceAll("_", " ") + " " + (typeof value === "string" ? value : JSON.stringify(value));
  for (const [end, unit] of [["_s", seconds], ["_bytes", bytes], ["_flops", flops]]) if (key.endsWith(end)) return key.slice(0, -end.length).replaceAll("_", " ") + " " + unit(value);
  return key.replaceAll("_", " ") + " " + digits(value);
};
/** Ranks that were lost or have joined, as the log says it. */
const world = (of) => [
  of.gone?.length ? "rank" + (of.gone.length > 1 ? "s " : " ") + of.gone.join(", ") + " gone" : null,
  of.joined ? of.joined + " joined" : null,
  of.ranks + " rank" + (of.ranks > 1 ? "s" : "") + " (" + of.layout + ")" + (of.spares ? ", " + of.spares + " waiting" : ""),
  of.from_memory ? "from snapshots in memory" : "from a checkpoint",
  of.lost_steps ? steps(of.lost_steps) + " step" + (of.lost_steps > 1 ? "s" : "") + " done again" : null,
  seconds(of.recovery_s) + " lost",
  of.changes_bits ? "bits of losses change" : null,
].filter((part) => part).join("; ") + (of.cause ? ". " + of.cause : "");
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const steps = (x) => WHOLE.format(x);
function format(key, x, chart) {
  if (x == null) return "–";
  if (chart && chart.bytes || /_bytes$/.test(key)) return bytes(x);
  if (chart && chart.percent) return +(100 * x).toPrecision(4) + "%";
  if (/_s$|^rank_busy_s/.test(key) && key !== "tokens_per_s") return seconds(x);
  if (key === "tokens_per_s" || key === "tokens") return count(x) + (key === "tokens" ? "" : " tokens/s");
  const unit = units[key] || "";
  return digits(x) + (unit && unit.length < 4 ? " " + unit : "");
}
const color = (i) => COLORS[i % COLORS.length];
const faint = (c) => c + "55";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- data --------------------------------------------------------------------------------------
async function get(path) {
  const headers = token ? { Authorization: "Bearer " + token } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (!answer.ok) throw new Error(answer.status === 401 ? "the token is wrong" : "the server says " + answer.status);
  return answer.json();
}
/** The steps that all runs have. */
function whole() {
  const first = Math.min(...runs.map((run) => run.first_step || 0)), last = Math.max(1, ...runs.map((run) => run.last_step || 0));
  return [Math.min(first, last - 1), last];
}
const range = () => view || whole();
async function load() {
  if (embedded) { series = embedded.series; draw(true); return; }
  if (pending) { again = true; return; }
  pending = true;
  try {
    do {
      again = false;
      const [from, to] = range(), margin = view ? (to - from) / 2 : 0;
      const keys = [...new Set(charts.flatMap((chart) => chart.keys))];
      const width = Math.max(300, Math.min(1000, ...charts.map((chart) => chart.box.clientWidth || 1000)));
      const query = "from=" + Math.max(0, Math.floor(from - margin)) + "&to=" + Math.ceil(to + margin) + "&buckets=" + Math.round(width * (view ? 1.5 : 0.75));
      series = await get("/api/series?" + query + "&keys=" + keys.map(encodeURI).join(","));
      draw(true);
    } while (again);
  } catch (error) { say(error.message); } finally { pending = false; }
}
function xs() {
  const { from, width, count, slots } = series.buckets, x = new Float64Array(count * slots);
  for (let i = 0; i < x.length; i++) x[i] = slots === 1 ? from + i : from + (i >> 1) * width + (i & 1 ? width * 0.75 : width * 0.25);
  return x;
}
/** Exponential moving average with a time constant in steps, of the means of buckets. */
function smoothed(values, { width, slots }) {
  const keep = Math.exp(-width / smoothing), out = new Array(values.length * slots).fill(null);
  let sum = 0, weight = 0;
  for (let i = 0; i < values.length; i++) {
    if (values[i] == null) continue;
    sum = keep * sum + (1 - keep) * values[i]; weight = keep * weight + (1 - keep); out[i * slots] = sum / weight;
  }
  return out;
}

// ---- charts ------------------------------------------------------------------------------------
function groups() {
  const keys = [...new Set(runs.flatMap((run) => run.keys))].filter((key) => !HIDDEN.has(key));
  const left = new Set(keys), found = [];
  for (const chart of CHARTS) {
    const own = keys.filter((key) => left.has(key) && (chart.keys ? chart.keys.includes(key) : chart.match.test(key)));
    if (!own.length) continue;
    own.forEach((key) => left.delete(key));
    found.push({ ...chart, keys: own });
  }
  left.forEach((key) => found.push({ title: key.replaceAll("_", " "), keys: [key] }));
  return found;
}
function lines(chart) {
  const all = [];
  runs.forEach((run, i) => {
    chart.keys.forEach((key, k) => {
      if (!run.keys.includes(key)) return;
      const several = chart.keys.length > 1 && !(chart.keys.includes("val_loss"));
      const stroke = several && runs.length === 1 ? color(k) : color(i);
      const name = (runs.length > 1 ? run.name + " " : "") + (chart.keys.length > 1 ? key.replace(/^(tasks|rank_busy_s)\//, "") : "");
      all.push({ run: i, key, name: name.trim() || run.name, stroke, dash: key === "val_loss" ? undefined : several && runs.length > 1 && k ? [4 + 2 * k, 3] : undefined });
    });
  });
  return all;
}
function build() {
  charts.forEach((chart) => chart.plot && chart.plot.destroy());
  $("charts").textContent = "";
  charts = groups().map((group) => {
    const card = element("div", "card chart"), head = element("div", "head");
    const key = group.keys[0], unit = group.bytes ? "" : group.percent ? "%" : units[key] || "";
    const at = element("span", "unit"), values = element("div", "values"), box = element("div", "plot");
    head.append(element("h2", "", group.title), element("span", "unit", unit), at, values);
    card.append(head, box); $("charts").append(card);
    const chart = { ...group, card, at, values, box, visible: !!embedded, stale: true, lines: null, plot: null };
    watcher.observe(card); sizes.observe(box);
    box.chart = card.chart = chart;
    card.addEventListener("pointerenter", () => { active = chart; });
    return chart;
  });
}
const watcher = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  target.chart.visible = isIntersecting || !!embedded;
  if (isIntersecting && target.chart.stale) next();
}), { rootMargin: "100px" });
const height = (width) => Math.round(Math.max(190, Math.min(420, width * 0.46)));
const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => {
  const { plot } = target.chart, width = target.clientWidth;
  if (plot && width && Math.abs(plot.width - width) > 1) plot.setSize({ width, height: height(width) });
}));
function make(chart, data) {
  const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const width = chart.box.clientWidth || 400;
  const drawn = [];
  chart.lines.forEach((line) => {
    const c = line.stroke, few = sparse(line.key), smooth = smoothing > 0 && !exact(line.key);
    drawn.push({ label: line.name, stroke: smooth ? faint(c) : c, width: few || exact(line.key) ? 2 : 1, dash: line.dash, spanGaps: true, show: shown[line.run] !== false, points: { show: few && dots, size: 5, fill: c }, line });
    if (smooth) drawn.push({ label: line.name, stroke: c, width: 2, dash: line.dash, spanGaps: true, show: shown[line.run] !== false, points: { show: false }, line, smooth: true });
  });
  const logarithmic = log && chart.log;
  const options = {
    width, height: height(width), legend: { show: false }, padding: [10, 18, 0, 0],
    cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "lockstep", setSeries: false }, points: { size: 6 }, focus: { prox: -1 } },
    scales: { x: { time: false, range: () => range() }, y: { distr: logarithmic ? 3 : 1, range: logarithmic ? undefined : (u, low, high) => span(chart, low, high) } },
    series: [{}, ...drawn],
    axes: [{ ...axis, size: 26, gap: 4, values: (u, splits) => splits.map((x) => (Number.isInteger(x) ? count(x) : "")) },
      { ...axis, size: 62, ...(chart.bytes ? { incrs: Array.from({ length: 60 }, (_, i) => 2 ** i) } : {}), values: (u, splits) => splits.map((x) => x == null ? "" : chart.bytes ? bytes(x) : chart.percent ? +(100 * x).toPrecision(3) + "%" : Math.abs(x) >= 1e4 ? count(x) : Math.abs(x) < 1e-3 && x ? x.toExponential(1) : String(+x.toPrecision(4))) }],
    hooks: { draw: [(u) => marks(u, chart)], setCursor: [(u) => hover(u, chart)], setSelect: [(u) => selected(u)], ready: [(u) => drags(u)] },
  };
  chart.plot = new uPlot(options, data, chart.box);
}
/** Points only where they stand apart. */
function dots(u, index, first, last) {
  let there = 0;
  for (let i = first; i <= last; i++) if (u.data[index][i] != null) there++;
  return there < u.bbox.width / 14;
}
/** A little room around the values; counts and shares begin at 0. */
function span(chart, low, high) {
  if (low == null || high == null) return [0, 1];
  if (chart.predicted) { const times = predictions().map(([, time]) => time); low = Math.min(low, ...times); high = Math.max(high, ...times); }
  if (chart.percent || chart.bytes || chart.predicted) low = Math.min(low, 0);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low < 0 || low - room > 0 ? low - room : 0, high + room];
}
const predictions = () => runs.map((run, i) => [i, run.plan && run.plan.prediction && run.plan.prediction.step_s]).filter(([i, time]) => time > 0 && shown[i] !== false);
/** Events of the runs, and predicted times. */
function marks(u, chart) {
  const { ctx, bbox } = u, ratio = devicePixelRatio || 1;
  ctx.save(); ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
  if (chart.events) {
    // One path per kind, one line per pixel.
    const places = {};
    runs.forEach((run, i) => {
      if (shown[i] === false) return;
      for (const event of run.events) {
        if (!EVENTS[event.event] || !(event.step > 0)) continue;
        const x = Math.round(u.valToPos(event.step, "x", true));
        if (x >= bbox.left && x <= bbox.left + bbox.width) (places[event.event] ||= new Set()).add(x);
      }
    });
    for (const [kind, all] of Object.entries(places)) {
      const small = kind === "checkpoint";
      ctx.strokeStyle = EVENTS[kind]; ctx.lineWidth = ratio; ctx.setLineDash(small ? [] : [4 * ratio, 3 * ratio]);
      ctx.beginPath();
      all.forEach((x) => { ctx.moveTo(x, small ? bbox.top + bbox.height - 7 * ratio : bbox.top); ctx.lineTo(x, bbox.top + bbox.height); });
      ctx.stroke();
    }
  }
  if (chart.predicted) {
    ctx.font = 11 * ratio + "px system-ui, sans-serif"; ctx.textAlign = "left"; ctx.textBaseline = "alphabetic"; ctx.setLineDash([6 * ratio, 4 * ratio]); ctx.lineWidth = 1.5 * ratio;
    for (const [i, time] of predictions()) {
      const y = u.valToPos(time, "y", true);
      ctx.strokeStyle = ctx.fillStyle = color(i);
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
      ctx.fillText("predicted " + seconds(time), bbox.left + 6 * ratio, y + 13 * ratio);
    }
  }
  ctx.restore();
}
function hover(u, chart) {
  if (moving) return;
  const index = u.cursor.idx;
  chart.values.textContent = "";
  if (index == null) { latest(chart); return; }
  const { width } = series.buckets, step = u.data[0][index];
  chart.at.textContent = "step " + steps(step) + (width > 1 ? " ± " + Math.ceil(width / 2) : "");
  u.series.forEach((line, i) => {
    if (!i || !line.show || (smoothing > 0 && !line.smooth && !exact(line.line.key))) return;
    let value = u.data[i][index];
    // Few values: the last one before.
    for (let j = index; value == null && j >= 0 && j > index - 3; j--) value = u.data[i][j];
    put(chart, line.line, value);
  });
}
function put(chart, line, value) {
  const entry = element("span"), dot = element("span", "dot"); dot.style.setProperty("--run", line.stroke);
  const name = runs.length > 1 || chart.lines.length > 1 ? line.name + " " : "";
  entry.append(dot, " " + name + format(line.key, value, chart));
  chart.values.append(entry);
}
function latest(chart) {
  chart.values.textContent = chart.at.textContent = "";
  (chart.lines || []).forEach((line) => { const value = runs[line.run].last && runs[line.run].last[line.key]; if (value != null && shown[line.run] !== false) put(chart, line, value); });
}
function selected(u) {
  const { left, width } = u.select;
  if (width < 4) return;
  zoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}
function drags(u) {
  u.over.addEventListener("dblclick", () => zoom());
  u.over.addEventListener("mousedown", (event) => {
    if (!event.shiftKey) return;
    event.stopImmediatePropagation(); event.preventDefault();
    const [from, to] = range(), at = event.clientX, scale = (to - from) / u.over.clientWidth;
    moving = true; active = charts.find((chart) => chart.plot === u);
    // Before uPlot, which would move the cursors of all charts.
    const move = (e) => { e.stopImmediatePropagation(); const by = (at - e.clientX) * scale; zoom(from + by, to + by); };
    const up = () => { removeEventListener("mousemove", move, true); removeEventListener("mouseup", up); moving = false; load(); };
    addEventListener("mousemove", move, true); addEventListener("mouseup", up);
  }, true);
}
let later = 0, frame = 0, active = null, moving = false;
/** Shows these steps, or all. Charts move at once with what they have; the numbers for the new view come after. */
function zoom(from, to) {
  const [first, last] = whole();
  if (from == null || to - from >= last - first) view = null;
  else {
    const width = Math.max(4, to - from);
    from = Math.max(first, Math.min(from, last - width));
    view = [from, from + width];
  }
  draw(false);
  clearTimeout(later);
  if (!moving) later = setTimeout(load, 60);
}
/** Draws the charts that are seen, that under the pointer first; the others when they come into sight. */
function draw(fresh) {
  charts.forEach((chart) => { chart.stale = true; chart.fresh = chart.fresh || fresh; });
  next();
}
/** A frame of this many ms looks fluid; where they take longer, fewer charts are drawn in each. */
const FRAME_MS = 25;
let allowed = 2, before = 0;
/** As many charts as a frame has time for; the next frame goes on. What the browser does after our drawing shows in the time from one frame to the next alone. */
function next() {
  if (frame) return;
  frame = requestAnimationFrame((now) => {
    frame = 0;
    const took = now - before;
    before = now;
    if (took < 250) allowed = took > FRAME_MS ? Math.max(1, allowed - 1) : Math.min(charts.length, allowed + 1);
    const wait = charts.filter((chart) => chart.visible && chart.stale);
    wait.sort((a, b) => (b === active) - (a === active) || (a.painted || 0) - (b.painted || 0));
    wait.slice(0, allowed).forEach(paint);
    if (wait.length > allowed) next();
  });
}
function paint(chart) {
  if (!series) return;
  chart.stale = false; chart.painted = performance.now();
  const [min, max] = range();
  // A batch draws before it returns; otherwise uPlot draws when all charts have been asked to.
  if (!chart.fresh && chart.plot) { chart.plot.batch(() => chart.plot.setScale("x", { min, max })); return; }
  chart.fresh = false;
  if (!chart.lines) chart.lines = lines(chart);
  const x = xs(), empty = new Array(x.length).fill(null), data = [x];
  chart.lines.forEach((line) => {
    let values = series.runs[line.run][line.key] || empty;
    if (log && chart.log) values = values.map((v) => (v > 0 ? v : null));
    data.push(values);
    if (smoothing > 0 && !exact(line.key)) {
      const { means } = series.runs[line.run];
      data.push(means && !means[line.key] ? empty : smoothed(means ? means[line.key] : values, series.buckets));
    }
  });
  if (!chart.plot) make(chart, data);
  else chart.plot.batch(() => { chart.plot.setData(data, false); chart.plot.setScale("x", { min, max }); });
  if (chart.plot.cursor.idx == null) latest(chart);
}
/** Makes the charts anew, as after another theme or smoothing. */
function remake() {
  charts.forEach((chart) => { if (chart.plot) chart.plot.destroy(); chart.plot = null; chart.fresh = true; });
  draw(true);
}

// ---- what stands around ------------------------------------------------------------------------
function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text != null) made.textContent = text;
  return made;
}
function say(text) { $("state").textContent = text; }
const setting = (run, key) => { const text = run.config && run.config[key]; return text == null ? null : text.replace(/^"(.*)"$/, "$1"); };
function describeState(run) {
  const total = +setting(run, "train.steps") || 0, step = run.last_step || 0, pace = run.last && run.last.step_s;
  if (run.ended === "finish") return "finished";
  if (run.ended === "interrupt") return "interrupted";
  const quiet = run.age_s == null ? null : run.age_s > Math.max(60, 10 * (pace || 0));
  if (quiet) return "no news for " + seconds(run.age_s);
  return embedded ? "running when this was made" : "running" + (pace && total > step ? ", " + seconds((total - step) * pace) + " left" : "");
}
function cards() {
  runs.forEach((run, i) => {
    let card = $("runs").children[i];
    if (!card) {
      card = element("div", "card run"); card.style.setProperty("--run", color(i));
      const label = element("label"), box = element("input");
      box.type = "checkbox"; box.checked = true;
      box.addEventListener("change", () => { shown[i] = box.checked; card.classList.toggle("off", !box.checked); remake(); });
      label.append(box, run.name); label.title = run.dir || "";
      const bar = element("div", "bar"); bar.append(element("i"));
      card.append(label, element("p", "now"), element("p", "about"), bar);
      $("runs").append(card);
    }
    const [, now, about, bar] = card.children, last = run.last || {}, total = +setting(run, "train.steps") || 0;
    const parts = ["step " + steps(run.last_step || 0) + (total ? " of " + steps(total) : "")];
    if (last.loss != null) parts.push("loss " + digits(last.loss));
    if (last.val_loss != null) parts.push("val loss " + digits(last.val_loss));
    const fp8 = run.fp8_compared || {}, percent = +(100 * fp8.difference).toPrecision(3);
    if (fp8.difference != null) parts.push("loss in fp8 " + (percent > 0 ? "+" : "") + percent + "% from bf16");
    if (fp8.not_finite) parts.push("loss in fp8 not finite at " + steps(fp8.not_finite) + " of " + steps(fp8.count) + " comparisons");
    if (last.tokens_per_s != null) parts.push(count(last.tokens_per_s) + " tokens/s");
    now.textContent = parts.join(" · ");
    const plan = run.plan || {};
    about.textContent = [describeState(run), plan.parameters ? count(plan.parameters) + " parameters" : "", plan.device || ""].filter(Boolean).join(" · ");
    bar.firstChild.style.width = (total ? Math.min(100, 100 * (run.last_step || 0) / total) : 0) + "%";
  });
}
function table(head, rows, kind) {
  const made = element("table", kind), top = element("tr");
  head.forEach((text) => top.append(element("th", "", text)));
  made.append(top);
  rows.forEach((cells) => { const row = element("tr"); cells.forEach((cell) => row.append(element("td", "", cell == null ? "–" : cell))); made.append(row); });
  return made;
}
function section(title, ...parts) {
  const card = element("div", "card wide");
  card.append(element("h2", "", title), ...parts);
  $("details").append(card);
}
const time = (s) => new Date(s * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
function details() {
  $("details").textContent = "";
  if (runs.length > 1) {
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config || {})))].filter((key) => new Set(runs.map((run) => (run.config || {})[key])).size > 1);
    section("Config differences", keys.length ? table(["key", ...runs.map((run) => run.name)], keys.map((key) => [key, ...runs.map((run) => setting(run, key))])) : element("p", "hint", "The configs are the same."));
  }
  const memory = runs.filter((run) => run.plan && run.plan.memory && run.plan.memory.classes);
  if (memory.length) {
    const most = Math.max(...memory.map((run) => run.plan.memory.total_bytes));
    const same = memory.every((run) => JSON.stringify(run.plan.memory) === JSON.stringify(memory[0].plan.memory));
    const parts = (same ? memory.slice(0, 1) : memory).flatMap((run) => {
      const bar = element("div", "memory");
      Object.entries(run.plan.memory.classes).forEach(([name, size]) => { const part = element("i"); part.style.width = 100 * size / most + "%"; part.style.background = CLASSES[name] || "#888"; part.title = name + " " + bytes(size); bar.append(part); });
      const legend = element("div");
      Object.entries(run.plan.memory.classes).filter(([, size]) => size).forEach(([name, size]) => { const key = element("span", "key"), dot = element("span", "dot"); dot.style.setProperty("--run", CLASSES[name] || "#888"); key.append(dot, name + " " + bytes(size)); legend.append(key); });
      return [element("p", "hint", (runs.length > 1 ? (same ? "every run" : run.name) + ": " : "") + bytes(run.plan.memory.total_bytes) + " per rank"), bar, legend];
    });
    section("Planned memory by class", ...parts);
  }
  let saved = 0;
  const events = runs.flatMap((run) => run.events.map((event) => ({ run, event }))).sort((a, b) => (b.event.unix_s || 0) - (a.event.unix_s || 0)).filter(({ event }) => event.event !== "checkpoint" || saved++ < 2 * runs.length).slice(0, 30);
  if (events.length) section("Latest events", table(["time", ...(runs.length > 1 ? ["run"] : []), "step", "event", ""], events.map(({ run, event }) => {
    const { event: kind, unix_s, step, ...rest } = event;
    const more = kind === "world" ? world(rest) : Object.entries(rest).filter(([, value]) => value != null).map(told).join(", ");
    return [unix_s ? time(unix_s) : "", ...(runs.length > 1 ? [run.name] : []), step == null ? "" : steps(step), kind.replaceAll("_", " "), more];
  }), "events"));
}

// ---- controls ----------------------------------------------------------------------------------
function setSmoothing() {
  const at = +$("smooth").value, [first, last] = whole();
  smoothing = at ? Math.max(1, ((last - first) / 4) ** (at / 100)) : 0;
  $("smooth-value").textContent = at ? count(Math.round(smoothing)) + " steps" : "off";
}
$("smooth").addEventListener("input", () => { setSmoothing(); remake(); });
$("log").addEventListener("change", () => { log = $("log").checked; remake(); });
const scaled = (by) => { const [from, to] = range(), middle = (from + to) / 2, half = (to - from) / 2 * by; zoom(middle - half, middle + half); };
const moved = (by) => { const [from, to] = range(), width = (to - from) * by; zoom(from + width, to + width); };
$("in").onclick = () => scaled(0.5); $("out").onclick = () => scaled(2); $("back").onclick = () => moved(-0.5); $("on").onclick = () => moved(0.5); $("all").onclick = () => zoom();
function theme(name) { document.documentElement.dataset.theme = name; if (charts.length) remake(); }
$("theme").onclick = () => { const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; try { localStorage.setItem("lockstep-theme", name); } catch {} theme(name); };
let kept = null; try { kept = localStorage.getItem("lockstep-theme"); } catch {}
const dark = matchMedia("(prefers-color-scheme: dark)");
theme(kept || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));

addEventListener("beforeprint", () => charts.filter((chart) => chart.stale).forEach(paint));

// ---- beginning, and what is new ----------------------------------------------------------------
let begun = false;
function take(page) {
  runs = page.runs; units = page.units;
  if (!begun) {
    // Many steps are read more easily smoothed.
    begun = true;
    const [first, last] = whole();
    if (last - first > 500) $("smooth").value = 45;
    setSmoothing();
  }
  cards(); build(); details();
  document.title = runs.map((run) => run.name).slice(0, 3).join(", ") + " · Lockstep";
}
async function look() {
  try {
    const { runs: now } = await get("/api/status");
    const news = now.some((run, i) => run.version !== runs[i].version);
    now.forEach((run, i) => Object.assign(runs[i], run));
    if (news) {
      const keys = now.some((run, i) => Object.keys(run.last).some((key) => !runs[i].keys.includes(key)));
      const page = await get("/api/runs");
      if (keys) take(page); else { page.runs.forEach((run, i) => Object.assign(runs[i], run)); details(); }
      await load();
    }
    cards();
    say("live, updated " + new Date().toLocaleTimeString());
  } catch (error) { say("not connected: " + error.message); }
  setTimeout(look, document.hidden ? 5000 : 1000);
}
(async () => {
  if (embedded) { take(embedded.page); say("made " + time(embedded.page.made_s)); load(); return; }
  try { take(await get("/api/runs")); await load(); } catch (error) { say(error.message); }
  look();
})();
})();
