/* The recorded run as an animation, in the scope of the page's own script. */
function showRun(recording) {
  const stage = document.getElementById("stage");
  const screen = stage.querySelector(".screen"), story = stage.querySelector(".story");
  const slider = stage.querySelector("input"), playButton = stage.querySelector('[data-do="play"]');
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  const rounds = recording.rounds;
  stage.hidden = false;

  const LENGTHS = { start: 1800, draft: 3000, call: 3800, verify: 4600, commit: 3600, end: 1000 };
  const frames = [];
  rounds.forEach((round, i) => {
    const phases = round.draft_mean.length ? ["draft", "call", "verify", "commit"] : ["call", "commit"];
    for (const phase of phases) frames.push({ round, number: i, phase });
  });
  frames.push({ round: rounds[rounds.length - 1], number: rounds.length - 1, phase: "end" });
  slider.max = frames.length - 1;

  const all = [...rounds.flatMap((r) => [...r.states, ...r.target_mean, r.x]), ...recording.density.map((d) => d[0])];
  const low = Math.min(...all) - 0.1, high = Math.max(...all) + 0.1;
  let frame = 0, progress = 1, playing = false, clock = 0, width = 0;

  const committed = (round) => [...round.states.slice(0, round.accepted + 1), round.x].map((v, j) => [round.step + j, v]);
  const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

  function tell({ round, number, phase }) {
    const count = round.draft_mean.length, last = round.step + count;
    const title = `Round ${number + 1}, `;
    const corrected = round.accepted < count;
    if (phase === "end") {
      const calls = rounds.length;
      return ["Done. ", `${recording.steps} steps took ${calls} calls; the sequential sampler makes ${recording.steps}. The end point is a draw from exactly its law.`];
    }
    if (phase === "draft") {
      const how = round.visited > 1
        ? `The first ${Math.min(round.visited, count)} replay the predictions evaluated along the last path (grey), with measured slopes and its recycled noise; beyond, the last one is carried on.`
        : "The last known prediction is carried on along the window, following the noise.";
      return [title + "draft. ", `${plural(count, "transition")} ahead of step ${round.step}, without any network call. ${how}`];
    }
    if (phase === "call") {
      return count
        ? [title + "one call. ", `The network sees all ${count + 1} states in one batch, and says where the target would have centred each next state (green). The gap to where the draft centred it, in units of the step's noise, is the mismatch: here ${digits(Math.min(...round.mismatch))} to ${digits(Math.max(...round.mismatch))}.`]
        : [title + "one call. ", number ? "Only the last step is left: it is taken as the sequential sampler takes it." : "Nothing is known yet, so there is nothing to draft from: the network is called at the start."];
    }
    if (phase === "verify") {
      const passed = round.uniform.filter((u, i) => u < round.bar[i]).length;
      const skipped = round.accepted - round.uniform.slice(0, round.accepted).filter((u, i) => u < round.bar[i]).length;
      const rule = !passed ? "None does, so no draft is kept." : `The last one that does decides: ${round.accepted} of ${count} are kept${skipped ? ", though some before it failed" : ""}.`;
      return [title + "verify. ", `Each draft has a bar h, worked out from the likelihood ratios up to there, and draws a uniform u, which passes below the bar. ${rule}`];
    }
    const more = !count ? "One exact transition is committed."
      : corrected ? `${plural(round.accepted, "draft")} committed; the next state comes from the residual (red), so that the law stays exact. What was computed beyond it is kept: predictions, and the noise, recycled.`
      : `All ${plural(count, "draft")} committed, and one exact transition more: the call has already paid for it.`;
    return [title + (corrected ? "correct. " : "commit. "), more];
  }

  function render() {
    const now = frames[frame], { round, number, phase } = now;
    const t = clamp(progress, 0, 1), count = round.draft_mean.length;
    width = Math.max(280, screen.clientWidth || 700);
    const narrow = width < 520, edge = narrow ? 34 : 64;
    const left = 30, top = 22, tall = narrow ? 230 : 300, gap = 58, test = narrow ? 74 : 92;
    const height = top + tall + gap + test + 34;
    const x = (k) => left + ((width - left - edge) * k) / recording.steps;
    const y = (v) => top + (tall * (high - v)) / (high - low);
    const level = (p) => top + tall + gap + test * (1 - p);
    const svg = put(null, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    const line = (points, name) =>
      put(svg, "polyline", { class: name, points: points.map(([k, v]) => `${x(k)},${y(v)}`).join(" ") });
    const dot = (k, v, name, r = 4) => put(svg, "circle", { class: name, cx: x(k), cy: y(v), r });

    // Axes, the window under way, the density it all ends in.
    if (count && phase !== "end")
      put(svg, "rect", { class: "window", x: x(round.step) - 5, y: top, width: x(round.step + count) - x(round.step) + 10, height: tall });
    put(svg, "line", { class: "axis", x1: left, x2: width - edge, y1: top + tall, y2: top + tall });
    for (let k = 0; k <= recording.steps; k += narrow ? 6 : 4)
      put(svg, "text", { x: x(k), y: top + tall + 16, "text-anchor": "middle" }, k);
    put(svg, "text", { x: width, y: top + tall + 16, "text-anchor": "end" }, "step");
    for (const v of [-1, 0, 1, 2]) if (v > low && v < high) put(svg, "text", { x: left - 10, y: y(v) + 4, "text-anchor": "end" }, v);
    const peak = Math.max(...recording.density.map((d) => d[1]));
    put(svg, "polyline", { class: "density", points: recording.density.map(([v, d]) => `${width - edge + 6 + ((edge - 12) * d) / peak},${y(v)}`).join(" ") });

    // What earlier rounds committed.
    const before = rounds.slice(0, phase === "end" ? rounds.length : number);
    const end = (r) => (r && r.accepted < r.draft_mean.length ? "corrected" : "kept");
    before.forEach((r) => line(committed(r), "kept"));
    before.forEach((r) => committed(r).slice(1).forEach(([k, v], j) => dot(k, v, j === r.accepted ? end(r) : "kept", 4)));
    dot(rounds[0].step, rounds[0].states[0], "kept", 4);
    if (phase !== "end") dot(round.step, round.states[0], end(rounds[number - 1]), 5.5);

    // The last path, to be replayed.
    if (round.replayed.length > 1 && (phase === "draft" || phase === "call")) {
      const old = round.replayed.map((v, j) => [round.step + j, v]);
      line(old, "ghost");
      old.forEach(([k, v]) => dot(k, v, "ghost", 3.5));
    }

    // The draft.
    if (count && phase !== "end") {
      const shown = phase === "draft" ? Math.ceil(t * count) : count;
      const path = round.states.slice(0, shown + 1).map((v, j) => [round.step + j, v]);
      if (phase === "commit") {
        const rest = path.slice(round.accepted);
        if (rest.length > 1) { line(rest, "ghost"); rest.slice(1).forEach(([k, v]) => dot(k, v, "ghost", 3.5)); }
      } else {
        line(path, "draft");
        path.slice(1).forEach(([k, v]) => dot(k, v, "draft"));
      }
    }

    // Where the target centres each next state, against where the draft did.
    if (phase === "call" || phase === "verify") {
      const half = Math.min(9, (x(1) - x(0)) * 0.42);
      round.target_mean.slice(0, Math.max(count, 1)).forEach((v, j) => {
        if (phase === "call" && j / Math.max(count, 1) > t) return;
        const k = round.step + j + 1;
        put(svg, "line", { class: "target", x1: x(k) - half, x2: x(k) + half, y1: y(v), y2: y(v) });
        if (count) put(svg, "line", { class: "gap", x1: x(k), x2: x(k), y1: y(v), y2: y(round.draft_mean[j]) });
      });
    }

    // What this round commits.
    if (phase === "commit") {
      const kept = committed(round), whole = round.accepted === count;
      const from = whole ? round.target_mean[count] : round.states[round.accepted + 1];
      const [k, to] = kept.pop();
      line(kept, "kept");
      kept.slice(1).forEach(([a, b]) => dot(a, b, "kept"));
      const ease = t < 0.5 ? 2 * t * t : 1 - 2 * (1 - t) ** 2;
      const v = from + (to - from) * ease;
      line([kept[kept.length - 1], [k, v]], "kept");
      if (!whole) put(svg, "line", { class: "corrected", x1: x(k), x2: x(k), y1: y(from), y2: y(v), "stroke-dasharray": "2 3" });
      dot(k, v, whole ? "kept" : "corrected", 6);
    }

    // The test: bars and uniforms, under the steps they decide on.
    put(svg, "text", { class: "name", x: 0, y: level(1) - 17 }, "the test: u below the bar h passes");
    put(svg, "line", { class: "axis", x1: left, x2: width - edge, y1: level(0), y2: level(0) });
    for (const p of [0, 1]) put(svg, "text", { x: left - 10, y: level(p) + 4, "text-anchor": "end" }, p);
    if (count && (phase === "verify" || phase === "commit")) {
      const wide = Math.min(18, (x(1) - x(0)) * 0.7);
      round.bar.forEach((h, j) => {
        if (phase === "verify" && j / count > t * 1.2) return;
        const k = round.step + j + 1, passes = round.uniform[j] < h;
        const taken = j + 1 === round.accepted && (phase === "commit" || t > 0.85);
        put(svg, "rect", { class: taken ? "bar taken" : "bar", x: x(k) - wide / 2, width: wide, y: level(h), height: Math.max(1.5, level(0) - level(h)) });
        put(svg, "circle", { class: passes ? "pass" : "fail", cx: x(k), cy: level(round.uniform[j]), r: 4 });
        if (taken) {
          put(svg, "line", { class: "axis", x1: x(k) + (x(1) - x(0)) / 2, x2: x(k) + (x(1) - x(0)) / 2, y1: top, y2: level(0), "stroke-dasharray": "3 3" });
          put(svg, "text", { class: "count", x: x(k), y: level(0) + 16, "text-anchor": "middle" }, `${round.accepted} kept`);
        }
      });
      if (!round.accepted && (phase === "commit" || t > 0.85))
        put(svg, "text", { class: "count", x: x(round.step) + 6, y: level(0) + 16 }, "none kept");
    }
    const steps = phase === "end" || phase === "commit" ? round.step + round.accepted + 1 : round.step;
    const calls = phase === "draft" ? number : number + 1;
    put(svg, "text", { class: "count", x: width, y: 13, "text-anchor": "end" }, `${plural(calls, "call")}, ${steps} of ${recording.steps} steps`);
    put(svg, "text", { class: "name", x: 0, y: 13 }, "↑ state");
    svg.setAttribute("aria-label", `${calls} calls made, ${steps} of ${recording.steps} steps committed`);
    screen.replaceChildren(svg);
  }

  function go(to, at = 1) {
    frame = clamp(to, 0, frames.length - 1);
    progress = at;
    slider.value = frame;
    const [title, text] = tell(frames[frame]);
    slider.setAttribute("aria-valuetext", title);
    story.replaceChildren();
    make(story, "b", "", title.trim());
    story.append(text);
    render();
  }

  function tick(time) {
    if (!playing) return;
    const passed = clock ? Math.min(100, time - clock) : 0;
    clock = time;
    const long = LENGTHS[frames[frame].phase];
    spent += passed;
    // The first half of a moment moves, the second stands still to be read.
    if (still.matches) progress = 1;
    else if (progress < 1) { progress = clamp(spent / (long * 0.45), 0, 1); render(); }
    if (spent > long) {
      if (frame === frames.length - 1) return pause();
      spent = 0;
      go(frame + 1, still.matches ? 1 : 0);
    }
    requestAnimationFrame(tick);
  }
  let spent = 0;
  function play() {
    if (frame === frames.length - 1) go(0, still.matches ? 1 : 0);
    playing = true; clock = 0; spent = 0;
    playButton.textContent = "Pause";
    story.setAttribute("aria-live", "off");
    requestAnimationFrame(tick);
  }
  function pause() {
    playing = false;
    playButton.textContent = "Play";
    story.setAttribute("aria-live", "polite");
    if (progress < 1) go(frame, 1);
  }
  const actions = {
    first: () => { pause(); go(0); },
    back: () => { pause(); go(frame - 1); },
    next: () => { pause(); go(frame + 1); },
    play: () => (playing ? pause() : play()),
  };
  for (const button of stage.querySelectorAll("button")) button.addEventListener("click", actions[button.dataset.do]);
  slider.addEventListener("input", () => { pause(); go(Number(slider.value)); });

  // At rest it shows the first verdict that was not unanimous; in sight it plays once, unless motion is unwelcome.
  const first = frames.findIndex((f) => f.phase === "verify" && f.round.accepted < f.round.draft_mean.length);
  go(Math.max(0, first));
  new ResizeObserver(() => { if (screen.clientWidth && Math.abs(screen.clientWidth - width) > 1) render(); }).observe(screen);
  if (!still.matches && "IntersectionObserver" in window) {
    const watch = new IntersectionObserver((seen) => {
      if (!seen.some((s) => s.isIntersecting)) return;
      watch.disconnect();
      go(0, 0);
      play();
    }, { threshold: 0.75 });
    watch.observe(screen);
    for (const kind of ["click", "input"]) stage.addEventListener(kind, () => watch.disconnect(), { capture: true });
  }
}

showRun(data.recording);
