// Tells plotly what to draw: the curves of the chosen axis and methods, in the colours of the theme.
(() => {
  "use strict";
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const state = { x: "paper_calls", y: "linear", off: new Set() };
  const live = document.getElementById("live");
  const charts = [...document.querySelectorAll(".chart")];
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const tone = (light, dark) => (isDark() ? dark : light);
  const escape = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  const finite = (values) => values.filter((value) => value !== null);
  const last = (values) => values.findLastIndex((value) => value !== null);
  let errors = 0;
  addEventListener("error", (event) => {
    root.dataset.errors = String((errors += 1));
    const box = document.getElementById("error");
    box.hidden = false;
    box.textContent = "This page met an error: " + event.message;
  });

  function axis(title, more) {
    return { ...(title && { title: { text: title, standoff: 8 } }), gridcolor: tone("#e5e4de", "#2c2f35"), linecolor: tone("#b9b8b1", "#4b4f57"),
      zeroline: false, exponentformat: "SI", automargin: true, ...more };
  }
  function layout(more) {
    return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x unified",
      font: { family: "system-ui, sans-serif", size: 12, color: tone("#62625e", "#a9a9a4") },
      hoverlabel: { bgcolor: tone("#ffffff", "#1a1c20"), bordercolor: tone("#b9b8b1", "#4b4f57"), font: { color: tone("#1f1f1d", "#ecebe6") } },
      margin: { l: 8, r: 70, t: 30, b: 36 }, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", ...more };
  }
  const heading = (text) => ({ text: `<b>${text}</b>`, xref: "paper", yref: "paper", x: 0, y: 1, yshift: 22, xanchor: "left", showarrow: false,
    font: { color: tone("#1f1f1d", "#ecebe6") } });

  // a line with its band, and how to read it
  function line(id, k, lead, [x, y, low, high], shift) {
    const look = data.methods[id];
    const colour = tone(look.colour, look.dark);
    const lift = (values) => values.map((value) => (value === null || (shift === null && value <= 0) ? null : value + (shift ?? 0)));
    const dash = look.dashes.length ? look.dashes.map((d) => `${1.7 * d}px`).join(",") : "solid";
    const range = low ? { customdata: lift(low).map((value, i) => [value, lift(high)[i]]) } : {};
    const band = low ? [{ x: [...x, ...[...x].reverse()], y: [...lift(low), ...lift(high).reverse()], fill: "toself", mode: "none",
      fillcolor: colour + "26", hoverinfo: "skip", type: "scatter", zorder: -k - 99 }] : [];
    return [...band, { x, y: lift(y), ...range, name: escape(look.name), type: "scatter", mode: "lines+markers", id, zorder: -k,
      line: { color: colour, width: lead ? 2.8 : 1.7, dash },
      marker: { color: colour, opacity: 1, line: { width: 0 }, size: y.map((_, i) => (i === last(y) ? (lead ? 9 : 7) : 0)) },
      hovertemplate: "%{y:.4g}" + (low ? "  <i>%{customdata[0]:.4g} … %{customdata[1]:.4g}</i>" : "") }];
  }

  // names at the right edge, moved apart and tied to the ends of their lines
  function names(traces, range, log, height) {
    const part = (value) => (log ? (Math.log10(value) - range[0]) / (range[1] - range[0]) : (value - range[0]) / (range[1] - range[0]));
    const ends = traces.filter((trace) => trace.id).map((trace) => ({ trace, at: Math.max(0, Math.min(1, part(finite(trace.y).pop()))) }));
    ends.sort((a, b) => a.at - b.at);
    const gap = 15 / height;
    ends.forEach((end, k) => { end.place = k ? Math.max(end.at, ends[k - 1].place + gap) : end.at; });
    ends.reverse().forEach((end, k) => { end.place = Math.min(end.place, k ? ends[k - 1].place - gap : 1); });
    return ends.map(({ trace, at, place }) => ({ text: trace.name, xref: "paper", yref: "paper", x: 1, y: at, ax: 15, ay: (at - place) * height,
      xanchor: "left", arrowhead: 0, arrowwidth: 0.8, arrowcolor: trace.line.color, standoff: 2, font: { color: trace.line.color } }));
  }

  const dotted = (from, y, color) => ({ type: "line", xref: "paper", x0: from, x1: 1, y0: y, y1: y, line: { width: 1, dash: "dot", color }, layer: "below" });

  function ranges(traces, kind) {
    const lines = traces.filter((trace) => trace.id);
    const all = lines.flatMap((trace) => finite(trace.customdata ? trace.customdata.flat() : trace.y));
    const floor = Math.min(...lines.flatMap((trace) => finite(trace.y)));
    const start = Math.max(...lines.map((trace) => finite(trace.y)[0]));
    const [least, most] = [Math.min(...all), Math.max(...all)];
    if (kind === "rho") return [Math.max(Math.min(least, 0), -2) - 0.1, Math.min(Math.max(most, 1), 3) + 0.1];
    if (kind === "sigma") return [Math.log10(Math.max(least / 1.5, most * 1e-12)), Math.log10(most * 1.5)];
    if (state.y === "log") { // a band may leave at the bottom, a method that blows up at the top
      const low = Math.max(least, floor / 2);
      return [Math.log10(low / 1.25), Math.log10(Math.max(Math.min(most, 3 * start), 2 * low) * 1.25)];
    }
    const span = Math.max(start - least, 1e-9 * Math.max(Math.abs(start), 1));
    return [least - 0.05 * span, Math.min(most, start + 0.25 * span) + 0.05 * span];
  }

  function drawing(box) {
    const panel = data.panels[Number(box.dataset.panel)];
    const kind = box.dataset.kind;
    const curves = panel.charts[kind][state.x];
    if (kind === "mix") {
      const [x, shares] = curves[box.dataset.method] || [[], {}];
      const traces = Object.entries(shares).reverse().map(([branch, y]) => ({ x, y, name: branch, stackgroup: "one", mode: "lines", type: "scatter",
        line: { width: 0.6, color: tone("#fbfaf7", "#131417") }, fillcolor: tone(...data.branches[branch]), hovertemplate: "%{y:.0%}" }));
      return [traces, layout({ margin: { l: 34, r: 6, t: 4, b: 20 }, xaxis: axis("", { nticks: 4, fixedrange: true }),
        yaxis: axis("", { range: [0, 1], tickformat: ".0%", nticks: 3, fixedrange: true }) })];
    }
    const log = kind === "sigma" || (kind === "loss" && state.y === "log");
    const shown = Object.entries(curves).filter(([id]) => !state.off.has(id));
    const shift = log ? null : kind === "loss" ? panel.star : 0;
    const traces = shown.map(([id, rows], k) => line(id, k, kind === "loss" && k === 0, rows, shift)).flat();
    if (!traces.length) return [[], layout({ annotations: [heading("No method that is shown has this.")], xaxis: { visible: false }, yaxis: { visible: false } })];
    const found = ranges(traces, kind);
    const rules = kind === "rho" ? panel.eta : [];
    const title = { loss: log ? `f − f*   (f* = ${Number(panel.star.toPrecision(5))})` : "training loss f", sigma: "σ", rho: "ρ, decrease over prediction" }[kind];
    const full = [0, 1.008 * Math.max(...traces.flatMap((trace) => finite(trace.x)))]; // with room for the last dot
    const eta = rules.map((y, k) => ({ text: `η${"₁₂"[k]} = ${y}`, xref: "paper", x: 0, y, xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 11 },
      bgcolor: tone("#ffffffcc", "#1a1c20cc"), borderpad: 1 }));
    const longest = Math.max(...shown.map(([id]) => data.methods[id].name.length));
    return [traces, layout({
      margin: { l: 8, r: 28 + 7.5 * longest, t: 30, b: 36 },
      annotations: [heading(title), ...eta, ...names(traces, found, log, box.clientHeight - 66)],
      shapes: [...rules.map((y) => dotted(0, y, tone("#8b8b85", "#86868a"))), // and from where a line ends early to its name
        ...traces.filter((trace) => trace.id && trace.x[last(trace.y)] < 0.97 * full[1]).map((trace) =>
          dotted(trace.x[last(trace.y)] / full[1], trace.y[last(trace.y)], trace.line.color))],
      xaxis: axis(data.axes[state.x], { range: full, spikecolor: tone("#8b8b85", "#86868a"), spikethickness: 1, spikedash: "solid", hoverformat: state.x === "seconds" ? ".4~g" : ",.0f", showgrid: false, showline: true, ticks: "outside", ticklen: 4 }),
      yaxis: axis("", { type: log ? "log" : "linear", range: found, exponentformat: "power", tickfont: { size: log ? 10 : 12 }, dtick: log && found[1] - found[0] > 2 ? 1 : undefined }) })];
  }

  function draw(box) {
    const wanted = `${state.x} ${state.y} ${[...state.off]} ${isDark()} ${box.clientWidth}`;
    if (!box.clientWidth || box.drawn === wanted) return;
    box.drawn = wanted;
    box.dataset.drawn = `${state.x} ${state.y}`;
    const [traces, look] = drawing(box);
    box.look = structuredClone(look);
    Plotly.react(box, traces, look, { displayModeBar: false, doubleClick: "reset" });
    if (!box.watched && box.dataset.kind === "loss") {
      box.watched = true;
      box.on("plotly_relayout", (change) => { // names stand at the ends of the whole range only
        if (!("xaxis.range[0]" in change) && !change["xaxis.range"]) return;
        const whole = box.look.xaxis.range.every((end, k) => Math.abs(end - box.layout.xaxis.range[k]) <= 1e-9 * Math.abs(box.look.xaxis.range[1]));
        Plotly.relayout(box, whole ? { annotations: box.look.annotations, shapes: box.look.shapes } : { annotations: box.look.annotations.slice(0, 1), shapes: [] });
      });
      box.addEventListener("keydown", (event) => read(box, event));
    }
  }

  function read(box, event) {
    const [from, to] = box.layout.xaxis.range;
    const whole = box.look.xaxis.range;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      box.cursor = Math.max(from, Math.min(to, (box.cursor ?? from) + (step * (to - from)) / 40));
      Plotly.Fx.hover(box, { xval: box.cursor }, "xy");
      const here = box.data.filter((trace) => trace.id).map((trace) => [trace.name, trace.y[trace.x.findIndex((x) => x >= box.cursor)]]);
      live.textContent = `${Number(box.cursor.toPrecision(4))}: ` + here.filter(([, y]) => y != null).map(([name, y]) => `${name} ${Number(y.toPrecision(4))}`).join(", ");
    } else if (["+", "=", "-"].includes(event.key)) {
      const half = ((to - from) / 2) * (event.key === "-" ? 2 : 0.5);
      const middle = box.cursor ?? (from + to) / 2;
      Plotly.relayout(box, { "xaxis.range": [Math.max(whole[0], middle - half), Math.min(whole[1], middle + half)] });
    } else if (event.key === "Escape") {
      Plotly.relayout(box, { "xaxis.range": [...whole], "yaxis.range": [...box.look.yaxis.range] });
    } else return;
    event.preventDefault();
  }

  const near = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) if (isIntersecting) { near.add(target); draw(target); } else near.delete(target);
    measure();
  }, { rootMargin: "600px 0px" });
  function measure() {
    Object.assign(root.dataset, { scrollWidth: root.scrollWidth, innerWidth: window.innerWidth, drawn: charts.filter((box) => box.drawn).length });
  }

  function apply() {
    Object.assign(root.dataset, { x: state.x, y: state.y, off: [...state.off].join(","), scheme: isDark() ? "dark" : "light" });
    for (const input of document.querySelectorAll(".seg input")) input.checked = state[input.name] === input.value;
    for (const chip of document.querySelectorAll(".chip")) chip.setAttribute("aria-pressed", String(!state.off.has(chip.dataset.method)));
    for (const row of document.querySelectorAll("[data-row]")) row.style.opacity = state.off.has(row.dataset.row) ? "0.4" : "";
    const button = document.getElementById("theme");
    button.innerHTML = isDark() ? "☀<span>Light</span>" : "☾<span>Dark</span>";
    button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
    near.forEach(draw);
    measure();
  }
  function remember() {
    const parts = [`x=${state.x}`, `y=${state.y}`];
    if (state.off.size) parts.push(`off=${[...state.off].map(encodeURIComponent).join(",")}`);
    if (root.dataset.theme) parts.push(`theme=${root.dataset.theme}`);
    try { history.replaceState(null, "", "#" + parts.join("&")); } catch { /* the address stays as it is */ }
    apply();
  }
  function fromAddress() {
    const given = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    if (given.get("x") in data.axes) state.x = given.get("x");
    if (["linear", "log"].includes(given.get("y"))) state.y = given.get("y");
    if (given.size) state.off = new Set((given.get("off") || "").split(",").filter((id) => id in data.methods));
    if (["light", "dark"].includes(given.get("theme"))) root.dataset.theme = given.get("theme");
    apply();
  }

  document.addEventListener("change", (event) => {
    if (event.target.closest(".seg")) { state[event.target.name] = event.target.value; remember(); }
  });
  document.addEventListener("click", (event) => {
    const id = event.target.closest(".chip")?.dataset.method;
    if (id !== undefined) { if (!state.off.delete(id)) state.off.add(id); remember(); }
    if (event.target.closest("#theme")) { root.dataset.theme = isDark() ? "light" : "dark"; remember(); }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  addEventListener("hashchange", fromAddress);
  addEventListener("resize", apply);
  addEventListener("beforeprint", () => charts.forEach(draw));
  const contents = document.querySelector(".contents details");
  if (matchMedia("(max-width: 62rem)").matches) contents.open = false;
  root.dataset.errors = "0";
  fromAddress();
  charts.forEach((box) => watcher.observe(box));
  root.dataset.ready = "true";
})();
