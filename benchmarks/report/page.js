/* Plots as inline SVG. All text goes in as text, never as markup. */
const data = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg";
document.documentElement.classList.add("scripted");

const put = (parent, tag, attributes = {}, text) => {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const make = (parent, tag, name, text) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const paper = window.matchMedia("print");
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/* The same digits as in the tables. */
const digits = (value) => {
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1);
  if (Number.isInteger(value)) return String(value);
  return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 4);
};
const plusMinus = (value, error) => {
  if (!error) return digits(value);
  const places = clamp(1 - Math.floor(Math.log10(error)), 0, 6);
  return `${value.toFixed(places)} ± ${error.toFixed(places)}`;
};
const tickText = (value) => (value === 0 ? "0" : String(Number(value.toPrecision(3))));

// ------------------------------------------------------------ scales

function linearTicks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9); t * step <= high + 1e-9 * step; t++) ticks.push(t * step);
  return ticks;
}

function logTicks(low, high, most) {
  for (const steps of [[1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const s of steps) {
        const t = s * 10 ** power;
        if (t >= low * 0.999 && t <= high * 1.001) ticks.push(t);
      }
    if (ticks.length <= most || steps.length === 1) return ticks;
  }
  return [];
}

/* A function from values to pixels, with its ticks. */
function scale(axis, values, from, to, most, exact) {
  let low = Math.min(...values), high = Math.max(...values);
  const log = axis.log && low > 0;
  if (log) {
    const room = exact ? 1.04 : 1.12;
    low /= room; high *= room;
  } else {
    if (axis.zero && low > 0) low = 0;
    const room = (high - low || Math.abs(high) || 1) * (exact ? 0.03 : 0.07);
    if (low !== 0) low -= room;
    high += room;
  }
  const f = log ? Math.log : (v) => v;
  const at = (v) => from + ((to - from) * (f(v) - f(low))) / (f(high) - f(low));
  at.ticks = (log ? logTicks : linearTicks)(low, high, most);
  return at;
}

/* Where there are few values on the axis and room for them, ticks stand at the values themselves. */
function atData(x, points) {
  const values = [...new Set(points.map((p) => p.x))].sort((a, b) => a - b);
  const apart = values.slice(1).every((v, i) => x(v) - x(values[i]) > 26);
  return values.length <= 8 && values.every(Number.isInteger) && apart ? values : null;
}

// ------------------------------------------------------------ plots

const SHAPES = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  (r) => `M${-r * 0.9},${-r * 0.9}h${r * 1.8}v${r * 1.8}h${-r * 1.8}z`,
  (r) => `M0,${-r * 1.15}L${r * 1.1},${r * 0.8}H${-r * 1.1}z`,
  (r) => `M0,${-r * 1.25}L${r * 1.1},0L0,${r * 1.25}L${-r * 1.1},0z`,
  (r) => `M0,${r * 1.15}L${r * 1.1},${-r * 0.8}H${-r * 1.1}z`,
];
const mark = (parent, series, x, y, r) =>
  put(parent, "path", { class: "mark", d: SHAPES[series.shape](r), transform: `translate(${x},${y})` });

/* Colours and shapes by method, the same on every plot of the page. */
const known = new Map();
function dress(plot) {
  let own = 0;
  for (const series of plot.series) {
    if (series.role === "reference") series.look = "kref";
    else if (series.role === "ours" && !own++) series.look = "kours";
    else {
      if (!known.has(series.name)) known.set(series.name, known.size);
      const taken = plot.series.map((s) => s.look);
      let k = known.get(series.name) % 8;
      while (taken.includes(`k${k}`) && taken.length <= 8) k = (k + 1) % 8;
      series.look = `k${k}`;
    }
    series.shape = series.role === "ours" ? 0 : (plot.series.indexOf(series) + 1) % SHAPES.length;
  }
}

const spread = (point) => (point.error ? [point.y - point.error, point.y + point.error] : [point.y]);

/* Lines over numbers. Returns the marks on the canvas: {series, point, x, y}. */
function drawLines(svg, plot, width) {
  const height = clamp(Math.round(width * 0.62), 250, 400);
  const left = 44, right = 12, top = 26, bottom = 40;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const points = plot.series.flatMap((s) => s.points);
  const x = scale(plot.x, points.map((p) => p.x), left, width - right, width < 420 ? 6 : 9, true);
  const ys = points.flatMap(spread).filter((v) => !plot.y.log || v > 0);
  const y = scale(plot.y, ys, height - bottom, top, 7, false);
  for (const t of y.ticks) {
    put(svg, "line", { class: "gridline", x1: left, x2: width - right, y1: y(t), y2: y(t) });
    put(svg, "text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, tickText(t));
  }
  put(svg, "line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
  for (const t of atData(x, points) || x.ticks) {
    put(svg, "line", { class: "axis", x1: x(t), x2: x(t), y1: height - bottom, y2: height - bottom + 4 });
    put(svg, "text", { x: x(t), y: height - bottom + 17, "text-anchor": "middle" }, tickText(t));
  }
  put(svg, "text", { class: "name", x: 0, y: 12 }, "↑ " + plot.y.label);
  put(svg, "text", { class: "name", x: width - right, y: height - 6, "text-anchor": "end" }, plot.x.label + " →");
  const marks = [];
  const strongestLast = [...plot.series].sort((a, b) => (a.role === "ours") - (b.role === "ours"));
  for (const series of strongestLast) {
    const group = put(svg, "g", { class: `series ${series.role} ${series.look}`, "data-series": series.name });
    if (series.line && series.points.length > 1)
      put(group, "path", { d: series.points.map((p, i) => `${i ? "L" : "M"}${x(p.x)},${y(p.y)}`).join("") });
    for (const p of series.points) {
      if (p.error) {
        const [low, high] = spread(p).map((v) => y(plot.y.log ? Math.max(v, y.ticks[0] / 10) : v));
        put(group, "line", { class: "error", x1: x(p.x), x2: x(p.x), y1: low, y2: high });
        for (const end of [low, high])
          put(group, "line", { class: "error", x1: x(p.x) - 4, x2: x(p.x) + 4, y1: end, y2: end });
      }
      if (series.role !== "reference") mark(group, series, x(p.x), y(p.y), series.role === "ours" ? 5 : 4);
      marks.push({ series, point: p, x: x(p.x), y: y(p.y) });
    }
    if (series.role === "reference") {
      const end = series.points[series.points.length - 1];
      const below = y(end.y) > height * 0.6 ? 15 : -7;
      put(group, "text", { class: "end", x: x(end.x), y: y(end.y) + below, "text-anchor": "end" }, series.name);
    }
  }
  return marks;
}

/* Categories from top to bottom, each name above its line: room for long names on small screens. */
function categories(svg, plot, width, values) {
  const row = 38, top = 6, bottom = 40;
  const height = top + row * plot.categories.length + bottom;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const at = scale(plot.y, values, 8, width - 14, width < 420 ? 6 : 9, true);
  for (const t of at.ticks) {
    put(svg, "line", { class: "gridline", x1: at(t), x2: at(t), y1: top, y2: height - bottom + 4 });
    put(svg, "text", { x: at(t), y: height - bottom + 18, "text-anchor": "middle" }, tickText(t));
  }
  plot.categories.forEach((name, i) => {
    put(svg, "text", { class: "name", x: 4, y: top + row * i + 13 }, name);
  });
  put(svg, "text", { class: "name", x: width - 14, y: height - 6, "text-anchor": "end" }, plot.y.label + " →");
  return [at, (name) => top + row * plot.categories.indexOf(name) + 25];
}

function drawDots(svg, plot, width) {
  const values = plot.series.flatMap((s) => s.points.flatMap(spread));
  const [at, line] = categories(svg, plot, width, values);
  for (const name of plot.categories)
    put(svg, "line", { class: "gridline", x1: 8, x2: width - 14, y1: line(name), y2: line(name) });
  const marks = [];
  // Several series on one line stand a little apart, so that equal values can be told.
  const onLine = (name) => plot.series.filter((s) => s.points.some((p) => p.x === name));
  const apart = (series, name) => 6 * (onLine(name).indexOf(series) - (onLine(name).length - 1) / 2);
  for (const series of plot.series) {
    const group = put(svg, "g", { class: `series ${series.role} ${series.look}`, "data-series": series.name });
    for (const p of series.points) {
      const y = line(p.x) + clamp(apart(series, p.x), -9, 9);
      if (p.error) {
        const [low, high] = spread(p).map(at);
        put(group, "line", { class: "error", x1: low, x2: high, y1: y, y2: y });
        for (const end of [low, high]) put(group, "line", { class: "error", x1: end, x2: end, y1: y - 4, y2: y + 4 });
      }
      mark(group, series, at(p.y), y, series.role === "ours" ? 6 : 5);
      marks.push({ series, point: p, x: at(p.y), y });
    }
  }
  return marks;
}

function drawBars(svg, plot, width, off) {
  const total = (name) => plot.series.flatMap((s) => s.points.filter((p) => p.x === name)).reduce((a, p) => a + p.y, 0);
  const [at, line] = categories(svg, plot, width, [0, ...plot.categories.map(total)]);
  const marks = [], filled = {};
  for (const series of plot.series) {
    const group = put(svg, "g", { class: `series ${series.role} ${series.look}`, "data-series": series.name });
    for (const p of series.points) {
      const from = filled[p.x] || 0, y = line(p.x) - 8;
      if (!off.has(series.name)) filled[p.x] = from + p.y;
      put(group, "rect", { class: "bar", x: at(from), y, width: Math.max(1, at(from + p.y) - at(from)), height: 16, rx: 2 });
      marks.push({ series, point: p, x: at(from + p.y / 2), y: y + 8 });
    }
  }
  return marks;
}

function legendEntry(plot, series, parent) {
  const button = make(parent, "button");
  button.type = "button";
  button.setAttribute("aria-pressed", "true");
  const svg = put(button, "svg", { viewBox: "0 0 20 12", "aria-hidden": "true" });
  const group = put(svg, "g", { class: `series ${series.role} ${series.look}` });
  if (plot.kind === "lines" && series.line) put(group, "path", { d: "M0,6H20" });
  if (plot.kind === "bars") put(group, "rect", { class: "bar", x: 4, width: 12, height: 12, rx: 2 });
  else if (series.role !== "reference") mark(group, series, 10, 6, 4.5);
  make(button, "span", "", series.name);
  return button;
}

function showPlot(plot) {
  const figure = document.getElementById(plot.id);
  if (!figure) return;
  dress(plot);
  const canvas = figure.querySelector(".canvas"), legend = figure.querySelector(".legend");
  const draw = { lines: drawLines, dots: drawDots, bars: drawBars }[plot.kind];
  const off = new Set();
  let marks = [], chosen = -1, svg = null, ring = null, width = 0;
  const tip = make(null, "div", "tip");
  tip.hidden = true;
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "group");
  canvas.setAttribute("aria-roledescription", "plot");
  canvas.setAttribute("aria-label", `${plot.title}. Arrow keys walk through the values.`);
  tip.setAttribute("role", "status");

  const visible = () => marks.filter((m) => !off.has(m.series.name));
  const hide = () => { tip.hidden = true; chosen = -1; if (ring) ring.setAttribute("visibility", "hidden"); };

  function redraw(fixed) {
    width = fixed || Math.max(260, canvas.clientWidth || 560);
    svg = put(null, "svg", { "aria-hidden": "true", focusable: "false" });
    marks = draw(svg, plot, width, off);
    ring = put(svg, "circle", { class: "focus", r: 9, visibility: "hidden" });
    for (const group of svg.querySelectorAll("[data-series]"))
      group.classList.toggle("off", off.has(group.dataset.series));
    canvas.replaceChildren(svg, tip);
    hide();
  }

  function show(m) {
    chosen = visible().indexOf(m);
    const same = visible().filter((o) => o.point.x === m.point.x).sort((a, b) => b.point.y - a.point.y);
    tip.replaceChildren();
    make(tip, "strong", "", plot.kind === "lines" ? `${plot.x.label}: ${digits(m.point.x)}` : String(m.point.x));
    for (const o of same) {
      const line = make(tip, "div", o === m ? "here" : "");
      make(line, "span", o.series.look, "●");
      make(line, "span", "who", o.series.name);
      make(line, "span", "", plusMinus(o.point.y, o.point.error));
    }
    if (m.point.note) make(tip, "em", "", m.point.note);
    tip.hidden = false;
    ring.setAttribute("visibility", "visible");
    ring.setAttribute("cx", m.x);
    ring.setAttribute("cy", m.y);
    const zoom = canvas.clientWidth / width, box = tip.getBoundingClientRect();
    const x = m.x * zoom, y = m.y * zoom;
    tip.style.left = `${clamp(x + 14 + box.width > canvas.clientWidth ? x - 14 - box.width : x + 14, 0, Math.max(0, canvas.clientWidth - box.width))}px`;
    tip.style.top = `${y - box.height - 12 > -20 ? y - box.height - 12 : y + 14}px`;
  }

  function nearest(event) {
    const box = svg.getBoundingClientRect(), zoom = width / box.width;
    const x = (event.clientX - box.left) * zoom, y = (event.clientY - box.top) * zoom;
    const far = (m) => (m.x - x) ** 2 + (m.y - y) ** 2;
    const best = visible().reduce((a, b) => (a && far(a) <= far(b) ? a : b), null);
    if (best && far(best) < 60 ** 2) show(best); else hide();
  }
  canvas.addEventListener("pointermove", nearest);
  canvas.addEventListener("pointerdown", nearest);
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move || !visible().length) return;
    event.preventDefault();
    const next = chosen < 0 ? 0 : (chosen + move + visible().length) % visible().length;
    show(visible()[next]);
  });

  for (const series of plot.series) {
    const button = legendEntry(plot, series, legend);
    button.addEventListener("click", () => {
      const on = off.has(series.name);
      if (on) off.delete(series.name); else off.add(series.name);
      button.setAttribute("aria-pressed", String(on));
      redraw();
    });
  }
  redraw();
  // On paper figures are narrower than they look: drawn for that, their letters stay legible.
  const wide = () => canvas.clientWidth > 700;
  window.addEventListener("beforeprint", () => redraw(wide() ? 620 : 380));
  window.addEventListener("afterprint", () => redraw());
  new ResizeObserver(() => { if (canvas.clientWidth && Math.abs(canvas.clientWidth - width) > 1 && !paper.matches) redraw(); }).observe(canvas);
}

for (const plot of data.plots) showPlot(plot);
