"use strict";
// Algorithms over THEORY, the formulas that rwsim.explore.formulas prints. No formula of the theory stands here: roots, sums over lags,
// Gauss nodes, and the order of a step. Hyperparameters are flat, in a rule's own order.
const Runtime = (() => {
  const NODES = 12; // as rwsim.theory.noise.ToySystem.length_squared
  const moment = (q, at) => THEORY.law.moment(q, at.fan_in, at.batch, at.loss_scale, at.neurons)[0];

  // Whether all roots of a real polynomial, highest coefficient first, lie in the left half plane (Routh).
  function stable(coefficients) {
    let upper = coefficients.filter((_, i) => i % 2 === 0), lower = coefficients.filter((_, i) => i % 2 === 1);
    if (!(upper[0] > 0)) return false;
    while (lower.length) {
      if (!(lower[0] > 0)) return false;
      const ratio = upper[0] / lower[0], below = [...lower.slice(1), 0];
      [upper, lower] = [lower, upper.slice(1).map((x, i) => x - ratio * below[i])];
    }
    return true;
  }

  // Gauss-Jacobi nodes and weights (sum 1) of (1 - x)^a (1 + x)^b: eigenvalues of the recurrence's tridiagonal matrix by bisection.
  function gauss(a, b, count) {
    const diagonal = [], square = [];
    for (let k = 0; k < count; k++) {
      const s = 2 * k + a + b;
      diagonal.push(k === 0 ? (b - a) / (a + b + 2) : ((b - a) * (b + a)) / (s * (s + 2)));
      square.push(
        k === 0 ? 0 : k === 1 ? (4 * (1 + a) * (1 + b)) / ((s * s) * (s + 1)) : (4 * k * (k + a) * (k + b) * (k + a + b)) / (s * s * (s + 1) * (s - 1)));
    }
    const below = (x) => {
      let found = 0, d = 1;
      for (let k = 0; k < count; k++) {
        d = diagonal[k] - x - (k ? square[k] / d : 0);
        if (d === 0) d = 1e-300;
        if (d < 0) found++;
      }
      return found;
    };
    const nodes = [], weights = [];
    for (let i = 0; i < count; i++) {
      let low = -1, high = 1;
      for (let step = 0; step < 200; step++) {
        const middle = (low + high) / 2;
        if (middle === low || middle === high) break;
        if (below(middle) > i) high = middle;
        else low = middle;
      }
      const x = (low + high) / 2;
      let before = 0, p = 1, total = 1;
      for (let k = 1; k < count; k++) {
        [before, p] = [p, ((x - diagonal[k - 1]) * p - Math.sqrt(square[k - 1]) * before) / Math.sqrt(square[k])];
        total += p * p;
      }
      nodes.push(x);
      weights.push(1 / total);
    }
    const sum = weights.reduce((s, w) => s + w, 0);
    return [nodes, weights.map((w) => w / sum)];
  }

  const memo = (size, make) => {
    const known = new Map();
    return (...key) => {
      const name = key.join(" ");
      if (!known.has(name)) {
        if (known.size >= size) known.delete(known.keys().next().value);
        known.set(name, make(...key));
      }
      return known.get(name);
    };
  };

  // Squared lengths of a gradient over their mean, and their weights.
  const lengths = memo(32, (batch) => {
    const [nodes, weights] = gauss(...THEORY.law.jacobi(batch), NODES);
    return [nodes.map((x) => THEORY.law.length(x, batch)[0]), weights];
  });

  // E[sign(n_t) sign(n_{t+k})] at k = 1, 2, ... of a kernel that falls by `rate`. Where the kernel has halved it is an analytic function
  // of rate^(k-1) that a Chebyshev series of its ratio to it gives to all digits.
  const signs = memo(8, (own, first, rate, past, batch, tail) => {
    const [nodes, weights] = lengths(batch);
    const product = (y) => {
      let sum = 0;
      for (let i = 0; i < nodes.length; i++)
        for (let j = 0; j < nodes.length; j++)
          sum += weights[i] * weights[j] * THEORY.common.product(own, first * y, past * rate * y, past, nodes[i], nodes[j])[0];
      return sum;
    };
    const count = rate === 0 ? 2 : Math.max(2, Math.ceil(Math.log(tail) / Math.log(rate)));
    const found = new Float64Array(count), ORDER = 24, START = 0.5;
    let k = 0;
    for (; k < count && Math.pow(rate, k) > START; k++) found[k] = product(Math.pow(rate, k));
    if (k === count) return found;
    const values = [], series = [];
    for (let j = 0; j < ORDER; j++) {
      const y = (START / 2) * (1 + Math.cos((Math.PI * (j + 0.5)) / ORDER));
      values.push(product(y) / y);
    }
    for (let i = 0; i < ORDER; i++)
      series.push((2 / ORDER) * values.reduce((s, v, j) => s + v * Math.cos((Math.PI * i * (j + 0.5)) / ORDER), 0));
    for (; k < count; k++) {
      const y = Math.pow(rate, k), x = (2 * y) / START - 1;
      let b1 = 0, b2 = 0;
      for (let i = ORDER - 1; i > 0; i--) [b1, b2] = [2 * x * b1 - b2 + series[i], b1];
      found[k] = y * (x * b1 - b2 + series[0] / 2);
    }
    return found;
  });

  // sum_{k >= 1} (1 - decay)^(k - 1) gamma_k.
  function summed(rule, hyper, at) {
    const gamma = signs(...rule.kernel(...hyper), at.batch, rule.tail), keep = 1 - rule.decay(...hyper)[0];
    let sum = 0;
    for (let k = gamma.length - 1; k >= 0; k--) sum = sum * keep + gamma[k];
    return sum;
  }

  // The normalizer: the one place, right of where the recurrence loses its stability, at which the gradient that it takes is the one
  // that its weights have. Bisection in its logarithm.
  function normalizer(rule, hyper, at) {
    const above = (log) => {
      const d = Math.exp(log);
      if (rule.bends && !stable(rule.stability(...hyper, d))) return false;
      const [grad, spread] = rule.moments(...hyper, d);
      return grad > 0 && spread > 0 && grad > moment(spread, at);
    };
    let low = -1, high = 1;
    while (!above(high) && high < 600) high += high - low;
    while (above(low) && low > -600) low -= high - low;
    for (let step = 0; step < 100; step++) {
      const middle = (low + high) / 2;
      if (middle === low || middle === high) break;
      if (above(middle)) high = middle;
      else low = middle;
    }
    return Math.exp(high);
  }

  // {exact: [norm, rotation, RMS update], paper: the same, time: steps}, or {error}.
  function equilibrium(name, hyper, at) {
    const rule = THEORY.rules[name];
    for (let i = 0; i < rule.needed.length; i++) if (hyper[rule.needed[i][0]] === 0) return { error: rule.needed[i][1] };
    let spread, exact;
    if (rule.direction === "sign") {
      const decay = rule.decay(...hyper)[0];
      if (!(decay > 0 && decay < 2)) return { error: rule.unstable };
      const sum = summed(rule, hyper, at);
      spread = rule.moments(...hyper, sum)[0];
      exact = rule.exact(...hyper, sum, at.fan_in);
    } else {
      if (!rule.bends && !stable(rule.stability(...hyper, 1))) return { error: rule.unstable };
      if (rule.direction === "linear") {
        // E omega^2 is proportional to the gradient, and the gradient inverse to E omega^2.
        spread = Math.sqrt(rule.moments(...hyper, 1)[1] * moment(1, at));
        exact = rule.exact(...hyper, 1, at.fan_in, moment(spread, at), spread);
      } else {
        const d = normalizer(rule, hyper, at);
        spread = rule.moments(...hyper, d)[1];
        exact = rule.exact(...hyper, d, at.fan_in, moment(spread, at), spread);
      }
    }
    const paper = rule.paper(...hyper, at.fan_in, moment(spread, at), spread);
    if (![...exact, ...paper].every((x) => Number.isFinite(x) && x > 0)) return { error: rule.unstable };
    return { exact, paper, time: rule.timeConstant(...hyper, exact[2] / exact[0])[0] };
  }

  // What the arcsine law has beyond its linear part, over the lags where it counts.
  function arcsines(states) {
    const buffers = states - 1;
    let past = [], sigma = [], weight = [];
    return (system, row, k, drive, held, grad, p) => {
      const size = Math.sqrt(held + k * k * grad), keep = system[0];
      let sum = 0, kept = 0;
      for (let i = 0; i < weight.length; i++) {
        let along = 0;
        for (let a = 0; a < buffers; a++) along += row[a] * past[i * buffers + a];
        const rho = Math.min(1, Math.max(-1, along / (sigma[i] * size)));
        sum += weight[i] * THEORY.common.beyond(rho)[0];
        if (Math.abs(rho) <= THEORY.linear) continue;
        const moved = [];
        for (let a = 0; a < buffers; a++) {
          let next = 0;
          for (let b = 0; b < buffers; b++) next += system[(a + 1) * states + b + 1] * past[i * buffers + b];
          moved.push(next);
        }
        for (let a = 0; a < buffers; a++) past[kept * buffers + a] = moved[a];
        sigma[kept] = sigma[i];
        weight[kept++] = weight[i] * keep;
      }
      const second = (i, j) => (i > j ? second(j, i) : p[i * states - (i * (i - 1)) / 2 + j - i]);
      for (let a = 0; a < buffers; a++) {
        let own = system[states * states + a + 1] * k * grad;
        for (let b = 0; b < buffers; b++)
          for (let c = 0; c < buffers; c++) own += system[(a + 1) * states + b + 1] * second(b + 1, c + 1) * row[c];
        past[kept * buffers + a] = own;
      }
      sigma[kept] = size;
      weight[kept++] = drive;
      past.length = kept * buffers;
      sigma.length = weight.length = kept;
      return sum;
    };
  }

  // The closure step by step: [norm, rotation] after every step, Float64Arrays. `factor(i)` is the schedule's, i = 0 ... steps - 1.
  function path(name, hyper, at, steps, factor, start) {
    const rule = THEORY.rules[name], states = rule.states, size = (states * (states + 1)) / 2;
    const norm = new Float64Array(steps), rotation = new Float64Array(steps);
    const [nodes, weights] = lengths(at.batch), beyond = arcsines(states), here = hyper.slice();
    let p = new Array(size).fill(0), v = 0;
    p[0] = (start * start) / at.fan_in;
    for (let t = 1; t <= steps; t++) {
      here[rule.lr] = hyper[rule.lr] * factor(t - 1);
      const grad = moment(p[0], at);
      let root = 1, gain = 0, own = 0, held, k, row, drive;
      if (rule.normalizer) [v, root] = rule.normalizer(...here, t, grad, v, ...p);
      if (rule.argument) {
        const argument = rule.argument(...here, ...p);
        [held, k] = argument;
        row = argument.slice(3, -1);
        drive = argument[argument.length - 1];
        for (let i = 0; i < nodes.length; i++) {
          const part = weights[i] * THEORY.common.gain(held, k * k * grad, nodes[i])[0];
          gain += part;
          own += part * nodes[i];
        }
      }
      const next = rule.step(...here, t, root, grad, gain, own, ...p);
      let across = next[size], drift = next[size + 1];
      const along = next[size + 2];
      if (rule.argument) {
        const system = rule.system(...here, t, root, gain, own);
        const pull = drive * beyond(system, row, k, drive, held, grad, p);
        next[0] += 2 * system[0] * pull;
        drift += pull;
        across -= (pull * (2 * along + pull)) / p[0];
      }
      const old = p[0];
      p = next.slice(0, size);
      const c = at.fan_in;
      norm[t - 1] = Math.sqrt(c * p[0]);
      rotation[t - 1] = THEORY.common.turned(c * old, c * p[0], c * across, c * drift)[0];
      if (!Number.isFinite(norm[t - 1])) {
        norm.fill(NaN, t - 1);
        rotation.fill(NaN, t - 1);
        break;
      }
    }
    return [norm, rotation];
  }

  // Factor on lr at step i = 0 ... steps - 1: a named shape behind `warm` steps of warmup.
  function factors(shape, warm, steps) {
    const { warmup } = THEORY.shapes, after = THEORY.shapes[shape];
    return (i) => (i < warm ? warmup(i, warm)[0] : after((i - warm) / Math.max(1, steps - warm))[0]);
  }

  return { equilibrium, path, factors, lengths, signs, stable };
})();
