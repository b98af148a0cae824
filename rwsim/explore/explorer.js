// The page: what is set, what follows from it, and how both are shown. Whatever comes from a link or the server goes to the page as text.
const Explorer = (() => {
  const config = JSON.parse(document.getElementById("explore").textContent);
  const at = (id) => document.getElementById(id);
  const controls = new Map(config.controls.map((c) => [c.key, c]));
  const shared = ["fan_in", "batch", "steps", "init_norm", "warmup"];
  const QUANTITIES = ["norm", "rotation", "rms_update"];
  const POINTS = 200, EARLY = 100, RATES = 61;
  // Of every optimizer its own values, so that a visit to another does not lose them.
  const own = Object.fromEntries(Object.entries(config.rules).map(([name, rule]) => [name, { ...rule.values }]));
  const state = { optimizer: "adamw", schedule: config.defaults.schedule };
  for (const key of shared) state[key] = config.defaults[key];
  const home = (key) => (shared.includes(key) ? state : own[state.optimizer]);
  const keys = () => [...config.rules[state.optimizer].keys, "loss_scale", ...shared];
  const problems = new Map();
  let measured = null, drawn = null;

  // --- values and sliders

  const text = (x) => String(Number(x.toPrecision(6)));
  const shown = (c, x) => (c.whole ? String(x) : c.scale === "near_one" ? String(Number(x.toPrecision(12))) : text(x));
  function fromSlider(c, place) {
    const share = place / config.steps;
    if (c.scale === "linear") return Math.round(c.low + share * (c.high - c.low));
    if (c.scale === "near_one") {
      const rest = Math.pow(1 - c.high, share);
      return Number((1 - Number(rest.toPrecision(2))).toPrecision(12));
    }
    const value = c.low * Math.pow(c.high / c.low, share);
    return c.whole ? Math.round(Number(value.toPrecision(3))) : Number(value.toPrecision(3));
  }
  function toSlider(c, value) {
    const share =
      c.scale === "linear" ? (value - c.low) / (c.high - c.low)
        : c.scale === "near_one" ? Math.log(1 - value) / Math.log(1 - c.high)
          : Math.log(value / c.low) / Math.log(c.high / c.low);
    return Math.round(config.steps * Math.min(1, Math.max(0, Number.isFinite(share) ? share : 0)));
  }
  // Why a value is refused, or nothing.
  function problem(c, value) {
    if (!Number.isFinite(value)) return `${c.label} must be a number.`;
    const inside = value >= c.least && value <= c.most;
    if (!inside) return `${c.label} must lie in [${c.least}, ${c.most}]${c.remedy ? `; ${c.remedy}` : ""}.`;
    return c.whole && !Number.isInteger(value) ? `${c.label} must be a whole number.` : "";
  }

  // --- the link

  function link() {
    const said = new URLSearchParams();
    said.set("optimizer", state.optimizer);
    for (const key of keys()) said.set(key, String(home(key)[key]));
    said.set("schedule", state.schedule);
    return said.toString();
  }
  const quoted = (x) => `“${x.length > 40 ? `${x.slice(0, 40)}…` : x}”`;
  // Take what a link says; what is wrong with it is said and left out.
  function restore(fragment) {
    const wrong = [];
    if (fragment.length > 2000) return ["The link is too long to be one of this page’s: nothing of it was taken."];
    let said;
    try {
      said = new Map(new URLSearchParams(fragment));
    } catch {
      return ["The link cannot be read: nothing of it was taken."];
    }
    if (said.has("optimizer")) {
      const name = said.get("optimizer");
      if (Object.hasOwn(config.rules, name)) state.optimizer = name;
      else wrong.push(`The link’s optimizer ${quoted(name)} is none of ${Object.keys(config.rules).join(", ")}.`);
      said.delete("optimizer");
    }
    if (said.has("schedule")) {
      const name = said.get("schedule");
      if (config.schedules.includes(name)) state.schedule = name;
      else wrong.push(`The link’s schedule ${quoted(name)} is none of ${config.schedules.join(", ")}.`);
      said.delete("schedule");
    }
    const known = keys();
    for (const [key, given] of said) {
      if (!known.includes(key)) {
        wrong.push(`The link’s ${quoted(key)} is nothing that ${config.rules[state.optimizer].label} has here.`);
        continue;
      }
      const c = controls.get(key), value = /^[-+0-9.eE]{1,30}$/.test(given) ? Number(given) : NaN, why = problem(c, value);
      if (why) wrong.push(`The link’s ${key}, ${quoted(given)}, was not taken: ${why}`);
      else home(key)[key] = value;
    }
    return wrong;
  }

  // --- what follows

  const law = () => ({ fan_in: state.fan_in, batch: state.batch, loss_scale: own[state.optimizer].loss_scale, neurons: config.neurons });
  const hyper = () => config.flat[state.optimizer].map((key) => (key ? own[state.optimizer][key] : 0));
  const lrPlace = () => config.flat[state.optimizer].indexOf("lr");
  const warmSteps = () => Math.min(state.steps - 1, Math.floor((state.warmup / 100) * state.steps + 0.5));
  function sampled(steps) {
    const found = new Set();
    for (let i = 0; i < POINTS; i++) found.add(Math.round((i * (steps - 1)) / (POINTS - 1)));
    for (let i = 0; i < EARLY; i++) found.add(Math.round(Math.pow(steps, i / (EARLY - 1)) - 1));
    return [...found].sort((a, b) => a - b);
  }
  const withRate = (values, rate) => values.map((v, i) => (i === lrPlace() ? rate : v));

  function compute() {
    const name = state.optimizer, values = hyper(), where = law(), steps = state.steps;
    const factor = Runtime.factors(state.schedule, warmSteps(), steps), here = Runtime.equilibrium(name, values, where);
    const [norm, rotation] = Runtime.path(name, values, where, steps, factor, state.init_norm);
    const places = sampled(steps), known = new Map();
    const level = (i) => {
      const rate = values[lrPlace()] * factor(i);
      if (!known.has(rate)) known.set(rate, Runtime.equilibrium(name, withRate(values, rate), where));
      return known.get(rate);
    };
    const series = (form, q) => places.map((i) => { const e = level(i); return e.error ? NaN : e[form][q]; });
    const rates = [];
    const c = controls.get("lr"), middle = values[lrPlace()];
    if (middle > 0) {
      const low = Math.min(c.low, middle), high = Math.max(c.high, middle);
      const from = Math.max(low, middle / 1000), to = Math.min(high, middle * 1000);
      for (let i = 0; i < RATES; i++) rates.push(from * Math.pow(to / from, i / (RATES - 1)));
    }
    const over = rates.map((rate) => Runtime.equilibrium(name, withRate(values, rate), where));
    return {
      here, steps: places.map((i) => i + 1), live: places.map((i) => factor(i) >= config.live),
      path: { norm: places.map((i) => norm[i]), rotation: places.map((i) => rotation[i]) },
      exact: { norm: series("exact", 0), rotation: series("exact", 1) },
      paper: { norm: series("paper", 0), rotation: series("paper", 1) },
      rates, over, reached: reached(norm, level, steps), blown: norm.findIndex((x) => !Number.isFinite(x)),
    };
  }
  // First step of the first stretch, long enough, in which the norm is near the equilibrium of its step.
  function reached(norm, level, steps) {
    const long = Math.max(1, Math.ceil(config.long * steps));
    let first = -1;
    for (let i = 0; i < steps; i++) {
      const e = level(i), near = !e.error && Math.abs(norm[i] / e.exact[0] - 1) <= config.near;
      if (!near) first = -1;
      else if (first < 0) first = i;
      if (near && i - first + 1 >= long) return first + 1;
    }
    return null;
  }

  // --- how it is shown

  const put = (id, said) => { if (at(id).textContent !== said) at(id).textContent = said; };
  function showControls() {
    for (const radio of document.getElementsByName("optimizer")) radio.checked = radio.value === state.optimizer;
    at("schedule").value = state.schedule;
    for (const [key, c] of controls) {
      const row = document.querySelector(`[data-key="${key}"]`), used = keys().includes(key);
      row.hidden = !used;
      if (!used || problems.has(key)) continue;
      const value = home(key)[key], box = at(key), slider = at(`${key}-slider`);
      if (document.activeElement !== box || Number(box.value) !== value) box.value = shown(c, value);
      slider.value = toSlider(c, value);
      slider.setAttribute("aria-valuetext", shown(c, value));
    }
    for (const section of document.querySelectorAll("[data-rule]")) section.hidden = section.dataset.rule !== state.optimizer;
  }
  function showProblems() {
    for (const key of controls.keys()) {
      const why = problems.get(key) || "";
      put(`${key}-problem`, why);
      if (why) at(key).setAttribute("aria-invalid", "true");
      else at(key).removeAttribute("aria-invalid");
    }
  }
  const say = (id, lines) => at(id).replaceChildren(...lines.map((line) => Object.assign(document.createElement("p"), { textContent: line })));
  let linkSaid = [];
  function messages() {
    const said = [...linkSaid];
    if (problems.size) said.push("What is drawn belongs to the last setting that could be taken.");
    else if (drawn.here.error) said.push(`No equilibrium: ${drawn.here.error}`);
    if (drawn.blown >= 0) said.push(`The weights blow up by step ${drawn.blown + 1}.`);
    if (at("messages").textContent !== said.join("")) say("messages", said);
  }
  function showNumbers() {
    const { here } = drawn, found = matching();
    QUANTITIES.forEach((q, i) => {
      const [exact, paper] = here.error ? [NaN, NaN] : [here.exact[i], here.paper[i]];
      put(`${q}-exact`, Plot.number(exact, 5));
      put(`${q}-paper`, Plot.number(paper, 5));
      put(`${q}-off`, Plot.percent(paper / exact - 1));
      const known = found && found.equilibrium && found.equilibrium[q];
      if (config.server) put(`${q}-measured`, known ? `${Plot.number(known[0], 5)} ± ${Plot.number(known[1], 2)}` : "–");
    });
    const share = here.time / state.steps;
    put("time", here.error ? "–" : `${Plot.number(here.time)} steps, ${Plot.number(share, 3)} of the run: in it ‖ω‖² forgets its start by a factor e`);
    put("reached", drawn.reached === null ? "not within this run" : `from step ${drawn.reached.toLocaleString("en")} on, within ${100 * config.near} % of the norm`);
    const [norm, turn] = here.error ? ["–", "–"] : [Plot.number(here.exact[0]), Plot.number(here.exact[1])];
    put("readout", here.error ? "no equilibrium" : `‖ω‖ ${norm} · ηᵣ ${turn} rad`);
    clearTimeout(showNumbers.timer);
    showNumbers.timer = setTimeout(() => {
      const label = config.rules[state.optimizer].label;
      put("said", here.error ? `${label}: no equilibrium.` : `${label}: exact norm ${norm}, rotation ${turn} radians per step; paper’s norm off by ${Plot.percent(here.paper[0] / here.exact[0] - 1)}.`);
    }, 600);
  }
  function showFigures() {
    const found = matching(), log = at("log-steps").checked;
    const units = { norm: "norm ‖ω‖", rotation: "rotation, rad/step" };
    for (const [i, q] of ["norm", "rotation"].entries()) {
      const series = ["paper", "exact", "path"].map((style) => ({ style, x: drawn.steps, y: drawn[style][q] }));
      if (found) {
        const { points, full } = found;
        series.push({ style: "full", x: full.step, y: full[q].map((v) => (v === null ? NaN : v)) });
        series.push({ style: "measured", kind: "dots", x: points.step, y: points[q].map((v) => (v === null ? NaN : v)), error: points[`${q}_error`].map((v) => 2 * v) });
      }
      // Where the rate has all but gone nothing is intended any more.
      const of = ["path", "exact", "paper"].flatMap((style) => drawn[style][q].filter((_, j) => drawn.live[j]));
      if (found) of.push(...found.points[q].filter((v, j) => v !== null && drawn.live[drawn.steps.findIndex((s) => s >= found.points.step[j])]));
      Plot.draw(at(`plot-${q}`), series, { label: "step", log, ends: log ? [1, Math.max(2, state.steps)] : [0, state.steps] }, { label: units[q], log: true, of });
      const last = drawn.path[q][drawn.path[q].length - 1];
      const level = drawn.here.error ? "no equilibrium" : `exact equilibrium ${Plot.number(drawn.here.exact[i])}, paper ${Plot.number(drawn.here.paper[i])}`;
      put(`figure-${q}-desc`, `${units[q]} over ${state.steps} steps, both drawn for each step: from ${Plot.number(drawn.path[q][0])} to ${Plot.number(last)}; ${level}.`);
      const over = ["paper", "exact"].map((style) => ({ style, x: drawn.rates, y: drawn.over.map((e) => (e.error ? NaN : e[style][i])) }));
      const known = found && found.equilibrium && found.equilibrium[q], rate = own[state.optimizer].lr;
      if (known) over.push({ style: "measured", kind: "dots", x: [rate], y: [known[0]], error: [2 * known[1]] });
      Plot.draw(at(`plot-${q}-lr`), over, { label: "learning rate η", log: true }, { label: units[q], log: true }, rate);
      put(`figure-${q}-lr-desc`, `${units[q]} in equilibrium over the learning rate, paper and exact; at ${text(rate)}: ${level}.`);
      for (const figure of [`figure-${q}`, `figure-${q}-lr`])
        for (const entry of at(figure).querySelectorAll("[data-series]"))
          if (entry.dataset.series === "full") entry.hidden = !found;
          else if (entry.dataset.series === "measured") entry.hidden = figure.endsWith("-lr") ? !known : !found;
    }
  }
  const matching = () => (measured && measured.link === link() ? measured.found : null);

  function redraw() {
    showControls();
    showProblems();
    if (!problems.size) drawn = compute();
    messages();
    if (!problems.size) {
      showNumbers();
      showFigures();
    }
    simulated();
    clearTimeout(redraw.timer);
    redraw.timer = setTimeout(() => { if (!problems.size) history.replaceState(null, "", `#${link()}`); }, 200);
  }
  // At most one redraw a frame, however fast a slider moves.
  let waiting = false;
  function later() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; redraw(); });
  }
  // Whatever a reader changes supersedes what was wrong with the link.
  const changed = () => { linkSaid = []; later(); };

  for (const [key, c] of controls) {
    at(`${key}-slider`).addEventListener("input", (event) => {
      problems.delete(key);
      home(key)[key] = fromSlider(c, Number(event.target.value));
      at(key).value = shown(c, home(key)[key]);
      changed();
    });
    at(key).addEventListener("input", (event) => {
      const value = event.target.value.trim() === "" ? NaN : Number(event.target.value), why = problem(c, value);
      if (why) problems.set(key, why);
      else {
        problems.delete(key);
        home(key)[key] = value;
      }
      changed();
    });
  }
  for (const radio of document.getElementsByName("optimizer"))
    radio.addEventListener("change", () => { problems.clear(); state.optimizer = radio.value; changed(); });
  at("schedule").addEventListener("change", (event) => { state.schedule = event.target.value; changed(); });
  at("log-steps").addEventListener("change", later);
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("reset").addEventListener("click", () => {
    problems.clear();
    Object.assign(own[state.optimizer], config.rules[state.optimizer].values);
    for (const key of shared) state[key] = config.defaults[key];
    state.schedule = config.defaults.schedule;
    changed();
  });
  at("copy").addEventListener("click", async () => {
    history.replaceState(null, "", `#${link()}`);
    try {
      await navigator.clipboard.writeText(location.href);
      put("copied", "The link to this setting is copied.");
    } catch {
      put("copied", "The link to this setting is in the address bar: copy it there.");
    }
  });
  window.addEventListener("hashchange", () => { problems.clear(); linkSaid = restore(location.hash.slice(1)); later(); });

  // --- simulation

  let running = false;
  function simulated() {
    if (!config.server || running) return;
    at("simulate").disabled = problems.size > 0;
    if (measured && !matching()) put("simulated", "The setting has changed since the simulation: simulate again.");
    else if (measured) put("simulated", measured.said);
  }
  async function simulate() {
    const asked = link(), body = { optimizer: state.optimizer, schedule: state.schedule };
    for (const key of keys()) body[key] = home(key)[key];
    running = true;
    at("simulate").setAttribute("aria-disabled", "true");
    put("simulated", "Walking …");
    try {
      const answer = await fetch(config.server.place, {
        method: "POST", headers: { "Content-Type": "application/json", [config.server.header]: config.server.token }, body: JSON.stringify(body),
      });
      const found = await answer.json();
      if (answer.ok) {
        const said = found.stopped || `${found.neurons} neurons walked ${body.steps.toLocaleString("en")} steps.`;
        measured = { link: asked, found, said: found.reason && !found.stopped ? `${said} No equilibrium value: ${found.reason}.` : said };
      } else put("simulated", `Not simulated: ${String(found.error).slice(0, 300)}`);
      running = false;
      if (answer.ok) redraw();
    } catch {
      put("simulated", "Not simulated: the server does not answer. Start it again with rwsim explore.");
    }
    running = false;
    at("simulate").removeAttribute("aria-disabled");
  }
  if (config.server) at("simulate").addEventListener("click", () => { if (!running && !problems.size) simulate(); });

  linkSaid = restore(location.hash.slice(1));
  drawn = compute();
  redraw();
  // For whoever wants the numbers behind the curves, from the browser's console.
  return { drawn: () => drawn };
})();
