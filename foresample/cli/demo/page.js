const by = id => document.getElementById(id);
const digits = (value, most = 1) => value >= 100 ? String(Math.round(value)) : value.toFixed(most);
const seconds = value => value < 1 ? `${digits(1000 * value, 0)} ms` : `${digits(value, 2)} s`;

function put(parent, name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

function facts(list, told) {
  list.replaceChildren(...Object.entries(told).map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(document.createElement("dt"), document.createElement("dd"));
    pair.firstChild.textContent = name;
    pair.lastChild.textContent = value;
    return pair;
  }));
}

/* One source of events at a time for each section; a new one ends the old one, here and in the server. */
const open = {};
function listen(path, numbers, status, hear) {
  open[path]?.close();
  const source = open[path] = new EventSource(`${path}?${new URLSearchParams(numbers)}`);
  const say = (text, fault = false) => { status.textContent = text; status.classList.toggle("fault", fault); };
  source.onmessage = message => {
    const event = JSON.parse(message.data);
    if (event.kind === "waiting") say("Waiting for the work before this to end …");
    else if (event.kind === "fault") { source.close(); say(event.text, true); }
    else { if (event.kind === "end") source.close(); hear(event, say); }
  };
  source.onerror = () => { source.close(); say("The demo does not answer: has it been ended?", true); };
}

/* ---------------------------------------------------------------- pictures */

const LINE = 9;
let seed = 0, drawing = null;

function draw() {
  const numbers = {window: by("window").value, steps: by("steps").value, count: by("count").value, label: by("label").value, seed: seed++};
  const run = drawing = {steps: +numbers.steps, rounds: 0, cost: {}};
  const figure = by("rounds").querySelector("svg");
  figure.replaceChildren();
  figure.setAttribute("viewBox", "0 0 800 40");
  by("draw-verdict").hidden = true;
  for (const name of ["sequential", "speculative"]) {
    by(name).removeAttribute("data-done");
    facts(by(name).querySelector("dl"), {});
    by(name).querySelector("img").hidden = true;
  }
  listen("draw", numbers, by("draw-status"), (event, say) => {
    if (run !== drawing) return;
    if (event.kind === "begin") run.window = event.window;
    else if (event.kind === "round") { shown(event, run, figure); say(`${event.of}: call ${event.calls}`); }
    else if (event.kind === "clocking") say(`${event.of}: once more, unwatched, for the clock …`);
    else if (event.kind === "done") done(event, run);
    else if (event.kind === "end") say(`Done, with window ${run.window}. Move the slider, or draw again with other seeds.`);
  });
}

function shown(event, run, figure) {
  const panel = by(event.of), image = panel.querySelector("img");
  image.src = event.png;
  image.alt = `${event.of} samples after ${event.calls} calls`;
  image.hidden = false;
  facts(panel.querySelector("dl"), {calls: event.calls});
  if (event.of !== "speculative") return;
  const wide = 800 / run.steps;
  for (const [step, drafted, committed] of event.rounds) {
    const y = LINE * run.rounds++;
    const bar = (from, count, kind) => put(figure, "rect", {x: from * wide, y, width: Math.max(0.5, count * wide - 0.6), height: LINE - 2, class: kind});
    if (drafted + 1 > committed) bar(step + committed, drafted + 1 - committed, "dropped");
    const corrected = committed <= drafted;
    bar(step, committed - corrected, "kept");
    if (corrected) bar(step + committed - 1, 1, "corrected");
  }
  figure.setAttribute("viewBox", `0 0 800 ${Math.max(40, LINE * run.rounds)}`);
}

function done(event, run) {
  run.cost[event.of] = event;
  facts(by(event.of).querySelector("dl"), {"calls a picture": digits(event.calls), "states evaluated": digits(event.evaluations), time: seconds(event.seconds)});
  by(event.of).dataset.done = "yes";
  const {sequential, speculative} = run.cost;
  if (!sequential || !speculative) return;
  const fewer = sequential.calls / speculative.calls, faster = sequential.seconds / speculative.seconds;
  const clock = faster > 0.95 && faster < 1.05 ? "about as fast on this machine's clock." : faster >= 1 ? `${digits(faster, 2)}× faster on this machine's clock.`
    : `${digits(1 / faster, 2)}× slower on this machine's clock: here every further state of a call costs nearly its full price. Fewer calls pay where it does not, on a GPU not yet full.`;
  const verdict = by("draw-verdict");
  verdict.textContent = `${digits(fewer, 2)}× fewer calls one after another; ${clock}`;
  verdict.hidden = false;
}

/* ---------------------------------------------------------------- the robot */

const ACTION = 20;
let pens = null;

function plan() {
  const numbers = {window: by("pen-window").value, shape: by("shape").value, plans: 14, seed: seed++};
  const mine = pens = {};
  for (const name of ["sequential", "speculative"]) {
    by(`pen-${name}`).removeAttribute("data-done");
    by(`pen-${name}`).querySelector("svg").replaceChildren();
    facts(by(`pen-${name}`).querySelector("dl"), {});
  }
  listen("plan", numbers, by("plan-status"), (event, say) => {
    if (mine !== pens) return;
    if (event.kind === "begin") {
      for (const name of ["sequential", "speculative"]) mine[name] = start(by(`pen-${name}`), event);
      say(`Planning, with window ${event.window} …`);
      const step = now => { if (mine !== pens) return; for (const pen of Object.values(mine)) move(pen, now); if (Object.values(mine).some(pen => !pen.over)) requestAnimationFrame(step); };
      requestAnimationFrame(step);
    } else if (event.kind === "plan") mine[event.of].plans.push(event);
    else if (event.kind === "end") { for (const pen of Object.values(mine)) pen.complete = true; say(`All plans are made, with window ${numbers.window}.`); }
  });
}

function start(panel, event) {
  const canvas = panel.querySelector("svg"), [x, y] = event.start;
  const path = put(canvas, "polyline", {class: "path"}), dot = put(canvas, "circle", {class: "pen still", cx: x, cy: -y, r: .05});
  return {panel, path, dot, points: [[x, -y]], plans: [], current: null, taken: 0, since: null, spent: 0, calls: 0, made: 0, complete: false, over: false};
}

/* A pen's own time runs on only while it has a plan to spend it on: what is shown is the latency, not this page's waiting. */
function move(pen, now) {
  if (pen.over) return;
  if (pen.current === null) {
    if (!pen.plans.length) { if (pen.complete) { pen.over = true; pen.panel.dataset.done = "yes"; } return; }
    pen.current = pen.plans.shift();
    pen.since = now;
    pen.taken = 0;
  }
  const plan = pen.current, passed = now - pen.since - plan.ms;
  const due = Math.min(plan.path.length, Math.max(0, Math.floor(passed / ACTION) + (passed >= 0 ? 1 : 0)));
  while (pen.taken < due) { const [x, y] = plan.path[pen.taken++]; pen.points.push([x, -y]); }
  const [x, y] = pen.points.at(-1);
  pen.dot.setAttribute("cx", x);
  pen.dot.setAttribute("cy", y);
  pen.dot.setAttribute("class", due ? "pen" : "pen still");
  pen.path.setAttribute("points", pen.points.map(point => point.join(",")).join(" "));
  if (due && plan.seen === undefined) {
    plan.seen = true;
    pen.made += 1;
    pen.spent += plan.ms;
    pen.calls += plan.calls;
    facts(pen.panel.querySelector("dl"), {"last plan": `${digits(plan.ms)} ms`, "mean plan": `${digits(pen.spent / pen.made)} ms`, "calls a plan": digits(pen.calls / pen.made), plans: pen.made});
  }
  if (pen.taken === plan.path.length && passed >= ACTION * plan.path.length) pen.current = null;
}

/* ---------------------------------------------------------------- controls */

for (const [id, go] of [["window", draw], ["pen-window", plan]]) {
  by(id).addEventListener("input", () => { by(`${id}-value`).textContent = by(id).value; });
  by(id).addEventListener("change", go);
}
by("draw").querySelector("form").addEventListener("submit", event => { event.preventDefault(); draw(); });
by("robot").querySelector("form").addEventListener("submit", event => { event.preventDefault(); plan(); });
draw();
