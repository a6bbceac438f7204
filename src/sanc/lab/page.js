// Draws the curves of the selected axis and methods with plotly, in the colours of the theme.
"use strict";
const root = document.documentElement;
const data = JSON.parse(document.getElementById("data").textContent);
const chosen = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
const charts = [...document.querySelectorAll(".chart")];
const system = matchMedia("(prefers-color-scheme: dark)");
let x, y, off, dark;
const tone = (light, night) => (dark ? night : light);

const layout = (more) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x unified",
  font: { family: "system-ui, sans-serif", size: 12, color: tone("#62625e", "#a9a9a4") },
  hoverlabel: { bgcolor: tone("#ffffff", "#1a1c20"), font: { color: tone("#1f1f1d", "#ecebe6") } },
  margin: { l: 8, r: 16, t: 30, b: 36 },
  dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  ...more,
});
const axis = (more) => ({
  gridcolor: tone("#e5e4de", "#2c2f35"), linecolor: tone("#b9b8b1", "#4b4f57"), zeroline: false,
  exponentformat: "SI", automargin: true, ...more,
});
const heading = (text) => ({
  text: `<b>${text}</b>`, xref: "paper", yref: "paper", x: 0, y: 1, yshift: 22, xanchor: "left", showarrow: false,
  font: { color: tone("#1f1f1d", "#ecebe6") },
});

// a line with its band, a marker at its end, and the text shown under the pointer
function line([method, [at, middle, low, high]], rank, shift) {
  const style = data.methods[method];
  const color = tone(style.colour, style.dark);
  const lift = (values) => values.map((value) => (value === null ? null : value + shift));
  const end = middle.findLastIndex((value) => value !== null);
  const band = {
    x: [...at, ...at.toReversed()], y: [...lift(low), ...lift(high).reverse()], fill: "toself", mode: "none",
    fillcolor: color + "26", hoverinfo: "skip", zorder: -rank - 99,
  };
  return [band, {
    x: at, y: lift(middle), customdata: lift(low).map((value, k) => [value, lift(high)[k]]), zorder: -rank,
    name: style.name.replaceAll("<", "&lt;"), mode: "lines+markers",
    line: { color, width: rank ? 1.7 : 2.8, dash: style.dashes.map((dash) => `${1.7 * dash}px`).join(",") || "solid" },
    marker: { color, opacity: 1, line: { width: 0 }, size: middle.map((_, k) => (k === end ? 7 : 0)) },
    hovertemplate: "%{y:.4g}  <i>%{customdata[0]:.4g} … %{customdata[1]:.4g}</i>",
  }];
}

function mix(curves) {
  const [at, shares] = curves ?? [[], {}];
  const traces = Object.entries(shares).reverse().map(([branch, share]) => ({
    x: at, y: share, name: branch, stackgroup: "one", mode: "lines", fillcolor: tone(...data.branches[branch]),
    line: { width: 0.6, color: tone("#fbfaf7", "#131417") }, hovertemplate: "%{y:.0%}",
  }));
  return [traces, layout({
    margin: { l: 34, r: 6, t: 4, b: 20 }, xaxis: axis({ nticks: 4, fixedrange: true }),
    yaxis: axis({ range: [0, 1], tickformat: ".0%", nticks: 3, fixedrange: true }),
  })];
}

function drawing({ panel: number, kind, method }) {
  const panel = data.panels[Number(number)];
  const curves = panel.charts[kind][x];
  if (kind === "mix") return mix(curves[method]);
  const [name, positive] = data.records[kind] ?? [];
  const log = positive || (kind === "loss" && y === "log");
  const shown = Object.entries(curves).filter(([id]) => !off.includes(id));
  const traces = shown.flatMap((entry, rank) => line(entry, rank, kind === "loss" && !log ? panel.star : 0));
  const title = name ?? (log ? `f − f*   (f* = ${Number(panel.star.toPrecision(5))})` : "training loss f");
  const eta = kind === "rho" ? panel.eta : [];
  return [traces, layout({
    annotations: [heading(shown.length ? title : "No selected method has this.")],
    shapes: eta.map((at, k) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: at, y1: at, layer: "below",
      line: { width: 1, dash: "dot", color: tone("#8b8b85", "#86868a") }, label: { text: `η${"₁₂"[k]} = ${at}`, textposition: "end" } })),
    xaxis: axis({ title: { text: data.axes[x], standoff: 8 }, rangemode: "tozero", showgrid: false, showline: true,
      ticks: "outside", ticklen: 4, hoverformat: x === "seconds" ? ".4~g" : ",.0f" }),
    yaxis: axis({ type: log || (kind === "loss" && panel.decades) ? "log" : "linear", range: kind === "loss" ? panel[y] : undefined, exponentformat: "power",
      autorangeoptions: kind === "rho" ? { clipmin: -2, clipmax: 3, include: [0, 1] } : {} }),
  })];
}

function draw(box) {
  box.dataset.drawn = `${x} ${y}`;
  Plotly.react(box, ...drawing(box.dataset), { displayModeBar: false, responsive: true });
}

function apply() {
  x = chosen.get("x") in data.axes ? chosen.get("x") : "paper_calls";
  y = chosen.get("y") === "log" ? "log" : "linear";
  off = (chosen.get("off") ?? "").split(",").filter((id) => id in data.methods);
  dark = (chosen.get("theme") ?? (system.matches ? "dark" : "light")) === "dark";
  root.style.colorScheme = tone("light", "dark");
  for (const input of document.querySelectorAll(".seg input")) input.checked = [x, y].includes(input.value);
  for (const chip of document.querySelectorAll("[data-method].chip")) chip.setAttribute("aria-pressed", !off.includes(chip.dataset.method));
  for (const row of document.querySelectorAll("[data-row]")) row.style.opacity = off.includes(row.dataset.row) ? 0.4 : 1;
  charts.filter((box) => box.dataset.drawn).forEach(draw);
}

function choose(key, value) {
  chosen.set(key, value);
  history.replaceState(null, "", `#${chosen}`);
  apply();
}

document.addEventListener("change", ({ target }) => choose(target.name, target.value));
document.addEventListener("click", ({ target }) => {
  const chip = target.closest(".chip");
  const id = chip?.dataset.method;
  if (chip?.id === "theme") choose("theme", tone("dark", "light"));
  else if (chip) choose("off", off.includes(id) ? off.filter((other) => other !== id) : [...off, id]);
});
system.addEventListener("change", apply);
addEventListener("beforeprint", () => charts.forEach(draw));
apply();
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting && !target.dataset.drawn) draw(target);
}, { rootMargin: "600px 0px" });
charts.forEach((box) => watcher.observe(box));
