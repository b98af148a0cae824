// Figures as rwsim.page.chart draws them, redrawn in place: same field, same ticks, same classes.
const Plot = (() => {
  const WIDTH = 360, HEIGHT = 236, RIGHT = 10, TOP = 10, BOTTOM = 40;
  const MINUS = "\u2212", SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const short = (x, digits) => Number(x.toPrecision(digits));

  function span(values, log) {
    const known = values.filter((v) => Number.isFinite(v) && (v > 0 || !log));
    if (!known.length) return log ? [1, 10] : [0, 1];
    let low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
    if (log) [low, high] = [Math.log(low), Math.log(high)];
    const room = 0.05;
    // What differs by rounding alone is one value.
    if (high - low <= (log ? 0.01 : 1e-3 * Math.max(Math.abs(low), Math.abs(high)))) {
      const more = log ? 0.2 : 0.02 * Math.abs(high) || 0.5;
      [low, high] = [low - more, high + more];
    } else {
      const wide = high - low;
      low -= low !== 0 || log ? room * wide : 0;
      high += high !== 0 || log ? room * wide : 0;
    }
    return log ? [Math.exp(low), Math.exp(high)] : [low, high];
  }

  // Round numbers from low to high, at most `most`.
  function ticks(low, high, log, most) {
    if (log) {
      const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
      let found = [];
      for (const mantissas of [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
        found = [];
        for (let e = first; e <= last; e++)
          for (const m of mantissas) {
            const x = m * Math.pow(10, e);
            if (low * 0.9999 <= x && x <= high * 1.0001) found.push(x);
          }
        if (found.length <= most) break;
      }
      if (found.length > most) {
        const every = Math.ceil(found.length / most);
        return found.filter((x) => Math.round(Math.log10(x)) % every === 0).map((x) => short(x, 3));
      }
      if (found.length >= 2) return found.map((x) => short(x, 3));
    }
    const size = Math.pow(10, Math.floor(Math.log10(high - low) - 1));
    let found = [];
    for (const m of [1, 2, 2.5, 5, 10, 20, 25, 50]) {
      const step = m * size;
      found = [];
      for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(short(i * step, 12));
      if (found.length <= most) break;
    }
    return found;
  }

  const grouped = (x) => {
    const [whole, rest] = String(short(Math.abs(x), 10)).split(".");
    return (x < 0 ? MINUS : "") + whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? `.${rest}` : "");
  };
  function power(x) {
    const exponent = Math.floor(Math.log10(Math.abs(x)) + 1e-12), mantissa = String(short(x / Math.pow(10, exponent), 3)).replace("-", MINUS);
    const raised = `10${String(exponent).replace(/./g, (c) => SUPERSCRIPT[c])}`;
    return mantissa === "1" ? raised : `${mantissa}×${raised}`;
  }
  // Labels of an axis' ticks, all as decimals or all as powers of ten.
  function tickTexts(values) {
    const plain = values.every((v) => v === 0 || (1e-3 * 0.9999 <= Math.abs(v) && Math.abs(v) < 1e5));
    return values.map((v) => (plain || v === 0 || v === 1 || v === 10 ? grouped(v) : power(v)));
  }
  // A number in a table, 4 significant digits.
  function number(x, digits = 4) {
    if (!Number.isFinite(x)) return "–";
    const size = Math.abs(short(x, digits));
    if (size >= 1000 && size < 1e6) return grouped(short(x, Math.max(digits, 4)));
    if (size !== 0 && (size < 1e-4 || size >= 1e6)) {
      const [mantissa, exponent] = x.toExponential(digits - 1).split("e");
      return `${Number(mantissa)}e${Number(exponent)}`.replace(/-/g, MINUS);
    }
    return String(short(x, digits)).replace("-", MINUS);
  }
  // A relative error: three decimals below 0.1 %, two below 10 %, one below 100 %, none above.
  function percent(x) {
    if (!Number.isFinite(x)) return "–";
    const size = Math.abs(100 * x), text = (100 * x).toFixed(size < 0.0995 ? 3 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
    if (Number(text) === 0) return `${text.replace("-", "")}\u00a0%`;
    const [whole, rest] = text.replace("-", "").split(".");
    return `${x < 0 ? MINUS : "+"}${whole.replace(/\B(?=(\d{3})+$)/g, ",")}${rest ? `.${rest}` : ""}\u00a0%`;
  }

  const element = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const scale = (low, high, start, end, log) => {
    const f = log ? Math.log : (x) => x, a = f(low), b = f(high);
    const to = (x) => start + ((f(x) - a) / (b - a)) * (end - start);
    return { low, high, log, to, holds: (x) => Number.isFinite(x) && (x > 0 || !log) };
  };

  // Draw into a <g>: series of {style, x, y, kind: line | dots, error}, axes {label, log, of: values that it must hold, else all}, `here`: a place on x to mark.
  function draw(group, series, xAxis, yAxis, here) {
    const reach = series.flatMap((s) => s.y.flatMap((v, i) => (s.error ? [v - s.error[i], v, v + s.error[i]] : [v])));
    const ys = scale(...span(yAxis.of || reach, yAxis.log), HEIGHT - BOTTOM, TOP, yAxis.log), bottom = HEIGHT - BOTTOM, parts = [];
    const yTicks = ticks(ys.low, ys.high, yAxis.log, 6), yTexts = tickTexts(yTicks);
    // Room for the widest tick, and the label.
    const LEFT = 26 + 6.2 * Math.max(0, ...yTexts.map((said) => said.length));
    const xs = scale(...(xAxis.ends || span(series.flatMap((s) => s.x), xAxis.log)), LEFT, WIDTH - RIGHT, xAxis.log);
    const xTicks = ticks(xs.low, xs.high, xAxis.log, 5), xTexts = tickTexts(xTicks);
    yTicks.forEach((v, i) => {
      const y = ys.to(v).toFixed(1);
      parts.push(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
      parts.push(element("text", { class: "tick", x: LEFT - 5, y: (ys.to(v) + 3.5).toFixed(1), "text-anchor": "end" }, yTexts[i]));
    });
    xTicks.forEach((v, i) => {
      const x = xs.to(v).toFixed(1), anchor = xs.to(v) > WIDTH - RIGHT - 12 ? "end" : "middle";
      parts.push(element("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: bottom }));
      parts.push(element("text", { class: "tick", x, y: bottom + 14, "text-anchor": anchor }, xTexts[i]));
    });
    parts.push(element("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: bottom, y2: bottom }));
    parts.push(element("text", { class: "label", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, xAxis.label));
    const turned = `translate(11 ${(TOP + bottom) / 2}) rotate(-90)`;
    parts.push(element("text", { class: "label", transform: turned, "text-anchor": "middle" }, yAxis.label));
    if (here !== undefined && xs.holds(here) && here >= xs.low && here <= xs.high)
      parts.push(element("path", { class: "here", d: `M${xs.to(here).toFixed(1)} ${TOP}V${bottom}` }));
    let known = false;
    for (const s of series) {
      const spots = s.x.map((x, i) => (xs.holds(x) && ys.holds(s.y[i]) && ys.low <= s.y[i] && s.y[i] <= ys.high ? [xs.to(x), ys.to(s.y[i])] : null));
      known = known || spots.some(Boolean);
      if (s.error) {
        const bars = spots.map((spot, i) => {
          if (!spot || !Number.isFinite(s.error[i])) return "";
          const low = s.y[i] - s.error[i], high = s.y[i] + s.error[i];
          return `M${spot[0].toFixed(1)} ${(ys.holds(low) ? ys.to(low) : bottom).toFixed(1)}V${ys.to(high).toFixed(1)}`;
        });
        parts.push(element("path", { class: `bar ${s.style}`, d: bars.join("") }));
      }
      if (s.kind === "dots") {
        const dots = spots.map((spot) => (spot ? `M${spot[0].toFixed(1)} ${spot[1].toFixed(1)}h0` : "")).join("");
        parts.push(element("path", { class: `dot ${s.style}`, d: dots }));
      } else {
        let pen = "M";
        const line = spots.map((spot) => {
          const piece = spot ? `${pen}${spot[0].toFixed(1)} ${spot[1].toFixed(1)}` : "";
          pen = spot ? "L" : "M";
          return piece;
        });
        parts.push(element("path", { class: `line ${s.style}`, d: line.join("") }));
      }
    }
    if (!known) parts.push(element("text", { class: "tick", x: (WIDTH + LEFT) / 2, y: HEIGHT / 2 - 15, "text-anchor": "middle" }, "nothing to draw"));
    group.replaceChildren(...parts);
  }

  return { draw, number, percent, ticks, tickTexts };
})();
