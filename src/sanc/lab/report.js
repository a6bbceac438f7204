// Draws the charts of the report. Everything it needs is in the page: it loads nothing.
(() => {
  "use strict";
  const root = document.documentElement;
  const problems = [];
  root.dataset.errors = "0";
  window.addEventListener("error", (event) => {
    problems.push(event.message);
    root.dataset.errors = String(problems.length);
    const box = document.getElementById("error");
    box.hidden = false;
    box.textContent = "This page met an error: " + problems.join("; ");
  });

  const data = JSON.parse(document.getElementById("data").textContent);
  const axes = Object.keys(data.axes);
  const known = data.methods.map((method) => method.id);
  const state = { x: axes[0], y: "linear", off: new Set() };
  const live = document.getElementById("live");
  const charts = [...document.querySelectorAll(".chart")];

  // ------------------------------------------------------------------------------------------ small things

  const escape = (text) =>
    String(text).replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const raise = (power) => "10" + String(power).replace(/[-0-9]/g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  const trim = (value, digits = 6) => String(Number(value.toPrecision(digits)));
  const px = (value) => value.toFixed(1);

  function tickText(value) {
    const size = Math.abs(value);
    if (size >= 1e6 && size < 1e10) return trim(value / 1e6) + "M";
    if (size >= 1e3 && size < 1e6) return trim(value / 1e3) + "k";
    if (size === 0 || (size >= 1e-3 && size < 1e3)) return trim(value);
    const power = Math.floor(Math.log10(size) + 1e-9);
    const front = value / 10 ** power;
    return (Math.abs(front - 1) < 1e-9 ? "" : trim(front, 3) + "·") + raise(power);
  }
  function exact(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5) return Math.round(value).toLocaleString("en-GB");
    return size < 1e-4 ? value.toExponential(2).replace("e", " · 10^").replace("+", "") : trim(value, 4);
  }

  function linearTicks(low, high, count) {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((front) => front * power).find((size) => size >= raw * 0.8);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12) + 1e-12 * step; k += 1) ticks.push(k * step);
    return ticks;
  }
  function logTicks(low, high, count) {
    const first = Math.floor(Math.log10(low));
    const last = Math.ceil(Math.log10(high));
    const fronts = high / low < 30 ? [1, 2, 5] : high / low < 300 ? [1, 3] : [1];
    const skip = fronts.length > 1 ? 1 : Math.max(1, Math.ceil((last - first) / count));
    const ticks = [];
    for (let power = first; power <= last; power += 1) {
      if (power % skip) continue;
      for (const front of fronts) {
        const value = front * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
      }
    }
    return ticks;
  }

  // positions at least `gap` apart, as near to the wanted ones as they can be, within [low, high]
  function spread(wanted, gap, low, high) {
    const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
    const groups = [];
    for (const i of order) {
      let group = { centre: wanted[i], members: [i] };
      for (;;) {
        const half = (gap * (group.members.length - 1)) / 2;
        group.centre = Math.max(low + half, Math.min(group.centre, high - half));
        const before = groups[groups.length - 1];
        if (!before || before.centre + (gap * (before.members.length - 1)) / 2 + gap <= group.centre - half + 1e-9) break;
        groups.pop();
        const [a, b] = [before.members.length, group.members.length];
        group = { centre: (before.centre * a + group.centre * b) / (a + b), members: [...before.members, ...group.members] };
      }
      groups.push(group);
    }
    const places = [];
    for (const { centre, members } of groups) {
      members.forEach((i, k) => { places[i] = centre + gap * (k - (members.length - 1) / 2); });
    }
    return places;
  }

  // ------------------------------------------------------------------------------------------ pieces of a chart

  const colour = (id) => `var(--m-${known.indexOf(id)})`;
  const dashes = (method) => (method.dashes.length ? ` stroke-dasharray="${method.dashes.map((d) => d * 1.7).join(" ")}"` : "");
  const inkOf = (id) => `color-mix(in srgb, ${colour(id)} 62%, var(--ink))`;
  const style = (id) => data.methods[known.indexOf(id)];
  const visible = (panel) => panel.methods.filter((method) => !state.off.has(method.id));
  let unique = 0;

  function frame(size, xs, ys, log, xName) {
    const { W, H, left, right, top, bottom } = size;
    const sx = (value) => left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (W - left - right);
    const part = log ? (v) => Math.log(v / ys[0]) / Math.log(ys[1] / ys[0]) : (v) => (v - ys[0]) / (ys[1] - ys[0]);
    const sy = (value) => H - bottom - clamp(part(value), -2, 3) * (H - top - bottom);
    let svg = "";
    for (const tick of log ? logTicks(ys[0], ys[1], 7) : linearTicks(ys[0], ys[1], H < 240 ? 4 : 6)) {
      svg += `<line class="grid" x1="${left}" x2="${W - right}" y1="${px(sy(tick))}" y2="${px(sy(tick))}"/>`;
      svg += `<text x="${left - 8}" y="${px(sy(tick) + 4)}" text-anchor="end">${tickText(tick)}</text>`;
    }
    for (const tick of linearTicks(xs[0], xs[1], W < 480 ? 4 : 7)) {
      const at = px(sx(tick));
      svg += `<line class="axis" x1="${at}" x2="${at}" y1="${H - bottom}" y2="${H - bottom + 4}"/>`;
      svg += `<text x="${at}" y="${H - bottom + 17}" text-anchor="middle">${tickText(tick)}</text>`;
    }
    svg += `<line class="axis" x1="${left}" x2="${W - right}" y1="${H - bottom}" y2="${H - bottom}"/>`;
    if (xName) svg += `<text x="${(left + W - right) / 2}" y="${H - 3}" text-anchor="middle">${escape(xName)}</text>`;
    return { sx, sy, part, svg };
  }

  function path(points) {
    let text = "";
    let pen = false;
    for (const point of points) {
      if (point === null) { pen = false; continue; }
      text += (pen ? "L" : "M") + px(point[0]) + " " + px(point[1]);
      pen = true;
    }
    return text;
  }
  function ribbon(upper, lower) {
    const up = upper.filter(Boolean);
    const down = lower.filter(Boolean).reverse();
    return up.length ? path([...up, ...down]) + "Z" : "";
  }

  // names at the right edge, moved apart, tied to the ends of their lines
  function endLabels(size, ends, edge) {
    const { W, H, right, top, bottom } = size;
    const places = spread(ends.map((end) => end.y), 15, top + 2, H - bottom - 2);
    return ends.map((end, k) => {
      const tone = colour(end.id);
      let svg = "";
      if (end.x < edge - 6) {
        svg += `<line class="rest" x1="${px(end.x)}" x2="${edge}" y1="${px(end.y)}" y2="${px(end.y)}" style="stroke:${tone}"/>`;
      }
      svg += `<path class="tie" d="M${edge + 3} ${px(end.y)}L${edge + 13} ${px(places[k])}" style="stroke:${tone}"/>`;
      svg += `<circle class="dot" cx="${px(end.x)}" cy="${px(end.y)}" r="${k ? 3.4 : 4.6}" style="fill:${tone}"/>`;
      svg += `<text class="name${k ? "" : " lead"}" x="${W - right + 16}" y="${px(places[k] + 4)}" style="fill:${inkOf(end.id)}">` +
        `${escape(style(end.id).name)}</text>`;
      return svg;
    }).reverse().join("");
  }

  // ------------------------------------------------------------------------------------------ the loss

  function losses(panel, box) {
    const log = state.y === "log";
    const shift = log ? 0 : panel.star;
    const curves = visible(panel).filter((method) => method.curves[state.x]).map((method) => {
      const [end, mean, low, high] = method.curves[state.x];
      const at = (i) => (end * i) / (mean.length - 1);
      const lift = (value) => (value === null || (log && value <= 0) ? null : value + shift);
      return { id: method.id, end, at, mean: mean.map(lift), low: (low || mean).map(lift), high: (high || mean).map(lift),
        banded: Boolean(low) };
    });
    if (!curves.length) return null;
    const full = [0, Math.max(...curves.map((curve) => curve.end)) || 1];
    const xs = box.zoom || full;
    let least = Infinity;
    let most = -Infinity;
    let floor = Infinity; // of the means: on a logarithmic axis a band may leave at the bottom
    for (const curve of curves) {
      curve.mean.forEach((_, i) => {
        const x = curve.at(i);
        const slack = curve.end / (curve.mean.length - 1);
        if (x < xs[0] - slack || x > xs[1] + slack || curve.low[i] === null) return;
        least = Math.min(least, curve.low[i]);
        most = Math.max(most, curve.high[i]);
        floor = Math.min(floor, curve.mean[i]);
      });
    }
    if (!(least <= most)) return null;
    const starts = Math.max(...curves.map((curve) => curve.mean[0] ?? -Infinity));
    let ys;
    if (log) {
      least = Math.max(least, floor / 2);
      const top = box.zoom ? most : Math.min(most, 3 * starts);
      ys = [least / 1.25, Math.max(top, least * 2) * 1.25];
    } else {
      const span = Math.max((box.zoom ? most : starts) - least, 1e-9 * Math.max(Math.abs(starts), 1));
      ys = [least - 0.05 * span, Math.min(most, (box.zoom ? most : starts) + 0.25 * span) + 0.05 * span];
    }
    return { log, curves, full, xs, ys };
  }

  function valueAt(curve, x) {
    const place = (x / (curve.end || 1)) * (curve.mean.length - 1);
    const i = Math.floor(place);
    if (i < 0 || place > curve.mean.length - 1 + 1e-9) return null;
    const [a, b] = [curve.mean[i], curve.mean[Math.min(i + 1, curve.mean.length - 1)]];
    if (a === null || b === null) return null;
    const t = place - i;
    const k = Math.min(Math.round(place), curve.mean.length - 1);
    return { value: a + t * (b - a), low: curve.low[k], high: curve.high[k] };
  }

  function drawLoss(box, panel) {
    const found = losses(panel, box);
    if (!found) { box.innerHTML = '<p class="none">No method is shown.</p>'; box.view = null; return; }
    const { log, curves, xs, ys } = found;
    const W = box.clientWidth;
    const size = { W, H: W < 520 ? 290 : Math.round(clamp(W * 0.46, 320, 430)), left: W < 520 ? 46 : 54, right: 62, top: 26, bottom: 40 };
    const { sx, sy, svg } = frame(size, xs, ys, log, data.axes[state.x]);
    const edge = W - size.right;
    const clip = `clip${(unique += 1)}`;
    let body = "";
    const ends = [];
    [...curves].reverse().forEach((curve) => {
      const lead = curve === curves[0];
      const tone = colour(curve.id);
      const points = (values) => values.map((value, i) => (value === null ? null : [sx(curve.at(i)), sy(value)]));
      if (curve.banded) body += `<path class="band" d="${ribbon(points(curve.high), points(curve.low))}" style="fill:${tone}"/>`;
      body += `<path class="line${lead ? " lead" : ""}" d="${path(points(curve.mean))}" style="stroke:${tone}"${dashes(style(curve.id))}/>`;
    });
    for (const curve of curves) {
      let last = curve.mean.length - 1;
      while (last > 0 && (curve.mean[last] === null || curve.at(last) > xs[1] * (1 + 1e-9))) last -= 1;
      if (curve.mean[last] === null || curve.at(last) < xs[0]) continue;
      ends.push({ id: curve.id, x: sx(curve.at(last)), y: clamp(sy(curve.mean[last]), size.top, size.H - size.bottom) });
    }
    const yName = log ? `f − f*   (f* = ${exact(panel.star)})` : "training loss f";
    box.innerHTML =
      `<svg viewBox="0 0 ${W} ${size.H}" height="${size.H}" aria-hidden="true"><defs><clipPath id="${clip}">` +
      `<rect x="${size.left}" y="${size.top}" width="${Math.max(edge - size.left, 1)}" height="${size.H - size.top - size.bottom}"/></clipPath></defs>` +
      `<text x="0" y="13" style="fill:var(--ink);font-weight:600">${escape(yName)}</text>${svg}` +
      `<g clip-path="url(#${clip})">${body}</g>${endLabels(size, ends, edge)}<g class="over"></g>` +
      `<rect class="hit" x="${size.left}" y="${size.top}" width="${Math.max(edge - size.left, 1)}" height="${size.H - size.top - size.bottom}"/></svg>` +
      `<div class="tip" hidden></div>` + (box.zoom ? '<button type="button" class="plain reset">Whole range</button>' : "");
    box.querySelector(".reset")?.addEventListener("click", () => zoom(box, null));
    box.view = { ...found, size, sx, sy, edge };
    const told = ends.map((end) => {
      const curve = curves.find((one) => one.id === end.id);
      const last = curve.mean.findLast((value) => value !== null);
      return `${style(end.id).name} ${exact(last)}`;
    });
    box.setAttribute("aria-label", `${panel.title}: ${log ? "f − f*, logarithmic," : "training loss"} over ${data.axes[state.x]}. ` +
      `At the end: ${told.join(", ")}. Arrow keys read along the curves; plus and minus zoom.`);
  }

  function inverse(view, at) {
    const { size, xs, edge } = view;
    return xs[0] + ((at - size.left) / (edge - size.left)) * (xs[1] - xs[0]);
  }

  function point(box, x, speak) {
    const view = box.view;
    if (!view) return;
    box.cursor = x;
    const over = box.querySelector(".over");
    const tip = box.querySelector(".tip");
    if (x === null) { over.innerHTML = ""; tip.hidden = true; return; }
    const { size, sx, sy, curves, log } = view;
    const rows = curves.map((curve) => ({ id: curve.id, ...(valueAt(curve, x) || { value: null }) })).filter((row) => row.value !== null);
    rows.sort((a, b) => b.value - a.value);
    over.innerHTML = `<line class="cross" x1="${px(sx(x))}" x2="${px(sx(x))}" y1="${size.top}" y2="${size.H - size.bottom}"/>` +
      rows.map((row) => `<circle class="dot" cx="${px(sx(x))}" cy="${px(clamp(sy(row.value), size.top, size.H - size.bottom))}" r="4" style="fill:${colour(row.id)}"/>`).join("");
    const unit = data.units[state.x];
    const where = `${state.x === "seconds" ? exact(x) : Math.round(Number(x.toPrecision(4))).toLocaleString("en-GB")} ${unit}`;
    tip.innerHTML = `<b>${escape(where)}</b>` + rows.map((row) =>
      `<span><i style="background:${colour(row.id)}"></i>${escape(style(row.id).name)}<em>${exact(row.value)}</em>` +
      (row.high > row.low ? `<small>${exact(row.low)} … ${exact(row.high)}</small>` : "") + "</span>").join("");
    tip.hidden = false;
    const wide = tip.offsetWidth;
    const room = box.clientWidth;
    const after = sx(x) + 14;
    tip.style.left = px(clamp(after + wide <= room ? after : sx(x) - 14 - wide, 0, Math.max(room - wide, 0))) + "px";
    if (speak) live.textContent = `${where}: ${rows.map((row) => `${style(row.id).name} ${exact(row.value)}`).join(", ")}${log ? " above f*" : ""}`;
  }

  function zoom(box, range) {
    box.zoom = range;
    draw(box);
    if (range === null) live.textContent = "whole range";
  }

  function follow(box) {
    let from = null;
    const local = (event) => event.clientX - box.getBoundingClientRect().left;
    box.addEventListener("pointermove", (event) => {
      if (!box.view) return;
      const { size, edge } = box.view;
      const at = clamp(local(event), size.left, edge);
      if (from === null && !event.target.closest(".hit")) { point(box, null); return; }
      point(box, inverse(box.view, at));
      if (from !== null && Math.abs(at - from) > 4) {
        box.querySelector(".over").insertAdjacentHTML("beforeend",
          `<rect class="brush" x="${px(Math.min(from, at))}" y="${size.top}" width="${px(Math.abs(at - from))}" height="${size.H - size.top - size.bottom}"/>`);
      }
    });
    box.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0 || !event.target.closest(".hit")) return;
      from = local(event);
      box.setPointerCapture(event.pointerId);
    });
    box.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const { size, edge } = box.view;
      const [a, b] = [from, clamp(local(event), size.left, edge)].sort((p, q) => p - q);
      from = null;
      if (b - a > 8) zoom(box, [inverse(box.view, a), inverse(box.view, b)]);
    });
    box.addEventListener("pointercancel", () => { from = null; });
    box.addEventListener("pointerleave", () => { if (from === null) point(box, null); });
    box.addEventListener("dblclick", () => zoom(box, null));
    box.addEventListener("blur", () => point(box, null));
    box.addEventListener("keydown", (event) => {
      if (!box.view || event.target !== box || event.ctrlKey || event.metaKey || event.altKey) return;
      const { xs, full } = box.view;
      const step = (xs[1] - xs[0]) / 40;
      const now = box.cursor ?? xs[0];
      const moves = { ArrowLeft: now - step, ArrowRight: (box.cursor ?? xs[0] - step) + step, Home: xs[0], End: xs[1] };
      if (event.key in moves) {
        point(box, clamp(moves[event.key], xs[0], xs[1]), true);
      } else if (event.key === "+" || event.key === "=" || event.key === "-") {
        const half = ((xs[1] - xs[0]) / 2) * (event.key === "-" ? 2 : 0.5);
        const low = clamp(now - half, full[0], Math.max(full[1] - 2 * half, full[0]));
        zoom(box, 2 * half >= full[1] - full[0] ? null : [low, low + 2 * half]);
        point(box, now, true);
      } else if (event.key === "Escape") {
        zoom(box, null);
      } else {
        return;
      }
      event.preventDefault();
    });
  }

  // ------------------------------------------------------------------------------------------ σ, ρ and the branches

  function drawTrace(box, panel, kind) {
    const curves = visible(panel).filter((method) => method[kind]?.[state.x]).map((method) => ({ id: method.id, rows: method[kind][state.x] }));
    if (!curves.length) { box.innerHTML = `<p class="none">No method that is shown has a ${kind === "sigma" ? "σ" : "ρ"}.</p>`; return; }
    const log = kind === "sigma";
    const W = box.clientWidth;
    const size = { W, H: 250, left: 50, right: 58, top: 26, bottom: 40 };
    const all = curves.flatMap((curve) => [...curve.rows[2], ...curve.rows[3]]);
    const rules = kind === "rho" ? panel.eta : [];
    let ys;
    if (log) {
      const positive = all.filter((value) => value > 0);
      const [low, high] = [Math.min(...positive), Math.max(...positive)];
      ys = [Math.max(low / 1.5, high * 1e-12), high * 1.5];
    } else {
      const [low, high] = [Math.max(Math.min(...all, 0), -2), Math.min(Math.max(...all, 1), 3)];
      ys = [low - 0.05 * (high - low), high + 0.05 * (high - low)];
    }
    const end = Math.max(...curves.map((curve) => curve.rows[0][curve.rows[0].length - 1])) || 1;
    const { sx, sy, svg } = frame(size, [0, end], ys, log, data.axes[state.x]);
    const clip = `clip${(unique += 1)}`;
    const edge = W - size.right;
    let body = rules.map((eta) => `<line class="rule" x1="${size.left}" x2="${edge}" y1="${px(sy(eta))}" y2="${px(sy(eta))}"/>`).join("");
    const ends = [];
    curves.forEach(({ id, rows }) => {
      const points = (values) => values.map((value, i) => (log && value <= 0 ? null : [sx(rows[0][i]), sy(value)]));
      body += `<path class="band" d="${ribbon(points(rows[3]), points(rows[2]))}" style="fill:${colour(id)}"/>`;
      body += `<path class="line" d="${path(points(rows[1]))}" style="stroke:${colour(id)}"${dashes(style(id))}/>`;
      const last = points(rows[1]).filter(Boolean).pop();
      if (last) ends.push({ id, x: last[0], y: clamp(last[1], size.top, size.H - size.bottom) });
    });
    const name = kind === "sigma" ? "σ" : "ρ, decrease over prediction";
    box.innerHTML = `<svg viewBox="0 0 ${W} ${size.H}" height="${size.H}" aria-hidden="true"><defs><clipPath id="${clip}">` +
      `<rect x="${size.left}" y="${size.top}" width="${Math.max(edge - size.left, 1)}" height="${size.H - size.top - size.bottom}"/></clipPath></defs>` +
      `<text x="0" y="13" style="fill:var(--ink);font-weight:600">${name}</text>${svg}<g clip-path="url(#${clip})">${body}</g>` +
      rules.map((eta, k) => `<text class="halo" x="${size.left + 8}" y="${px(sy(eta) + 4)}">η${"₁₂"[k]} = ${trim(eta)}</text>`).join("") +
      `${endLabels(size, ends, edge)}</svg>`;
    box.setAttribute("aria-label", `${panel.title}: ${name} over ${data.axes[state.x]}, median of the steps with the 10 and 90 % quantiles. ` +
      `At the end: ${curves.map(({ id, rows }) => `${style(id).name} ${exact(rows[1][rows[1].length - 1])}`).join(", ")}.`);
  }

  function drawMix(box, panel) {
    const method = panel.methods.find((one) => one.id === box.dataset.method);
    const found = method?.mix?.[state.x];
    if (!found) { box.innerHTML = ""; return; }
    const [end, shares] = found;
    const W = box.clientWidth;
    const size = { W, H: 118, left: 34, right: 6, top: 6, bottom: 22 };
    const sx = (i, count) => size.left + (i / (count - 1)) * (W - size.left - size.right);
    const sy = (value) => size.H - size.bottom - value * (size.H - size.top - size.bottom);
    let body = "";
    let base = null;
    for (const [branch, values] of [...shares].reverse()) {
      const below = base || values.map(() => 0);
      const above = values.map((value, i) => Math.min(below[i] + value, 1));
      const count = values.length;
      body += `<path class="slice" style="fill:var(--b-${branch})" d="${ribbon(above.map((v, i) => [sx(i, count), sy(v)]), below.map((v, i) => [sx(i, count), sy(v)]))}">` +
        `<title>${escape(data.branches[branch])}</title></path>`;
      base = above;
    }
    let ticks = "";
    for (const share of [0, 0.5, 1]) ticks += `<text x="${size.left - 6}" y="${px(sy(share) + 4)}" text-anchor="end" font-size="10.5">${share * 100} %</text>`;
    for (const tick of linearTicks(0, end || 1, 3)) {
      const at = size.left + (tick / (end || 1)) * (W - size.left - size.right);
      ticks += `<text x="${px(at)}" y="${size.H - 7}" text-anchor="${tick ? (at > W - 24 ? "end" : "middle") : "start"}" font-size="10.5">${tickText(tick)}</text>`;
    }
    box.innerHTML = `<svg viewBox="0 0 ${W} ${size.H}" height="${size.H}" aria-hidden="true">${body}${ticks}</svg>`;
    box.setAttribute("aria-label", `${style(method.id).name}: share of the steps by branch over ${data.axes[state.x]}. At the start ` +
      `${shares.map(([b, v]) => `${data.branches[b]} ${Math.round(100 * v[0])} %`).join(", ")}; at the end ` +
      `${shares.map(([b, v]) => `${data.branches[b]} ${Math.round(100 * v[v.length - 1])} %`).join(", ")}.`);
  }

  // ------------------------------------------------------------------------------------------ when to draw

  function draw(box) {
    if (!box.clientWidth) return;
    const panel = data.panels[Number(box.dataset.panel)];
    const kind = box.dataset.kind;
    if (kind === "loss") drawLoss(box, panel);
    else if (kind === "mix") drawMix(box, panel);
    else drawTrace(box, panel, kind);
    box.drawn = `${state.x} ${state.y} ${[...state.off]} ${box.clientWidth}`;
    box.dataset.drawn = `${state.x} ${state.y}`;
  }
  function refresh(box) {
    if (box.drawn !== `${state.x} ${state.y} ${[...state.off]} ${box.clientWidth}`) draw(box);
  }
  const near = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) { near.add(entry.target); refresh(entry.target); } else near.delete(entry.target);
    }
    measure();
  }, { rootMargin: "600px 0px" });
  const resizer = new ResizeObserver((entries) => {
    for (const entry of entries) if (near.has(entry.target)) refresh(entry.target);
    measure();
  });
  function measure() {
    root.dataset.scrollWidth = String(root.scrollWidth);
    root.dataset.innerWidth = String(window.innerWidth);
    root.dataset.drawn = String(charts.filter((box) => box.drawn).length);
  }

  // ------------------------------------------------------------------------------------------ state and controls

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches);
  const themeButton = document.getElementById("theme");
  function paintTheme() {
    themeButton.innerHTML = isDark() ? '☀<span class="long">Light</span>' : '☾<span class="long">Dark</span>';
    themeButton.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
    root.dataset.scheme = isDark() ? "dark" : "light";
  }

  function apply() {
    root.dataset.x = state.x;
    root.dataset.y = state.y;
    root.dataset.off = [...state.off].join(",");
    for (const input of document.querySelectorAll(".seg input")) input.checked = state[input.name] === input.value;
    for (const chip of document.querySelectorAll(".chip")) chip.setAttribute("aria-pressed", String(!state.off.has(chip.dataset.method)));
    for (const row of document.querySelectorAll("[data-row]")) row.style.opacity = state.off.has(row.dataset.row) ? "0.4" : "";
    near.forEach(refresh);
    paintTheme();
    measure();
  }
  function remember() {
    const parts = [`x=${state.x}`, `y=${state.y}`];
    if (state.off.size) parts.push(`off=${[...state.off].map(encodeURIComponent).join(",")}`);
    if (root.dataset.theme) parts.push(`theme=${root.dataset.theme}`);
    try { history.replaceState(null, "", "#" + parts.join("&")); } catch { /* the address stays as it is */ }
  }
  function fromAddress() {
    const hash = location.hash.slice(1);
    if (!hash.includes("=")) return;
    const given = new URLSearchParams(hash);
    if (axes.includes(given.get("x"))) setX(given.get("x"));
    if (["linear", "log"].includes(given.get("y"))) state.y = given.get("y");
    state.off = new Set((given.get("off") || "").split(",").filter((id) => known.includes(id)));
    if (["light", "dark"].includes(given.get("theme"))) root.dataset.theme = given.get("theme");
  }
  function setX(x) {
    if (x !== state.x) for (const box of charts) box.zoom = null;
    state.x = x;
  }

  document.addEventListener("change", (event) => {
    if (!event.target.closest(".seg")) return;
    if (event.target.name === "x") setX(event.target.value); else state.y = event.target.value;
    apply();
    remember();
  });
  document.addEventListener("click", (event) => {
    const chip = event.target.closest(".chip");
    if (!chip) return;
    const id = chip.dataset.method;
    if (state.off.has(id)) state.off.delete(id); else state.off.add(id);
    apply();
    remember();
  });
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    paintTheme();
    remember();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintTheme);
  window.addEventListener("hashchange", () => { fromAddress(); apply(); });
  window.addEventListener("resize", measure);
  window.addEventListener("beforeprint", () => charts.forEach(refresh));
  const contents = document.querySelector(".contents details");
  if (contents && window.matchMedia("(max-width: 62rem)").matches) contents.open = false;

  fromAddress();
  for (const box of charts) {
    if (box.dataset.kind === "loss") follow(box);
    watcher.observe(box);
    resizer.observe(box);
  }
  apply();
  root.dataset.ready = "true";
})();
