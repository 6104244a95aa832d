"use strict";
// Keys, theme, choices that submit themselves, and reloading while a run goes on. Reads nothing but the page it is on.
const root = document.documentElement;
const saved = localStorage.getItem("turnwise-theme");
if (saved) root.dataset.theme = saved;

function toggleTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("turnwise-theme", root.dataset.theme);
}

document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

const byId = (id) => document.getElementById(id);
const exportLink = byId("export");
if (exportLink) exportLink.href = exportLink.getAttribute("href") + location.search;
byId("theme")?.addEventListener("click", toggleTheme);
byId("help")?.addEventListener("click", () => byId("keys").showModal());
byId("runs")?.addEventListener("change", (event) => { location.href = event.target.value; });
for (const form of document.querySelectorAll("form.choice")) {
  form.querySelector("select")?.addEventListener("change", () => form.submit());
  if (form.querySelector("select")) form.querySelector("button").hidden = true;  // it serves who reads without scripts
}

// A token that is explained on this page: only the right side is loaded anew. Without this the link loads the whole page.
let latest = 0;
async function openToken(link) {
  const side = byId("side");
  if (!side || new URL(link.href).pathname !== location.pathname) { location.href = link.href; return; }
  const request = ++latest;
  side.setAttribute("aria-busy", "true");
  document.querySelector("a.tok.chosen")?.classList.remove("chosen");
  link.classList.add("chosen");
  const answer = await fetch(link.href).catch(() => null);
  if (request !== latest) return;  // another token was clicked meanwhile
  const fresh = answer?.ok && new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("side");
  if (!fresh) { location.href = link.href; return; }
  side.replaceChildren(...fresh.childNodes);
  side.removeAttribute("aria-busy");
  history.replaceState(null, "", link.href);
  if (exportLink) exportLink.href = exportLink.getAttribute("href").split("?")[0] + location.search;
}

document.addEventListener("click", (event) => {
  const link = event.target.closest(".side a.tok");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  openToken(link);
});

function moveToken(by) {
  const all = [...document.querySelectorAll("a.tok")];
  const at = all.findIndex((a) => a.classList.contains("chosen"));
  const next = all[at < 0 ? 0 : at + by];
  if (next) openToken(next);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const view = [...document.querySelectorAll("nav ol a")].find((a) => a.firstElementChild?.textContent === event.key);
  if (view) view.click();
  else if (event.key === "/") { byId("search")?.focus(); event.preventDefault(); }
  else if (event.key === "t") toggleTheme();
  else if (event.key === "e") exportLink?.click();
  else if (event.key === "?") byId("keys")?.showModal();
  else if (event.key === "ArrowRight") moveToken(1);
  else if (event.key === "ArrowLeft") moveToken(-1);
});

// Line charts: the pointer shows the step under it with the value of each line, a click opens that step.
const drawn = (name, attributes, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
};
for (const chart of document.querySelectorAll("svg[data-series]")) {
  const series = JSON.parse(chart.dataset.series), probe = drawn("g", { class: "probe" }), box = chart.viewBox.baseVal;
  let step = null;
  chart.append(probe);
  chart.addEventListener("pointermove", (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    const near = series.filter((s) => s.points.length)
      .map((s) => [s.name, s.points.reduce((a, b) => Math.abs(b[2] - x) < Math.abs(a[2] - x) ? b : a)]);
    if (!near.length) return;
    const [at, , left] = near.map(([, point]) => point).reduce((a, b) => Math.abs(b[2] - x) < Math.abs(a[2] - x) ? b : a);
    const here = near.filter(([, point]) => point[0] === at), end = left > box.width / 2;
    step = at;
    const lines = [`step ${at}`, ...here.map(([name, point]) => here.length > 1 ? `${name} ${point[1]}` : point[1])];
    probe.replaceChildren(
      drawn("line", { x1: left, x2: left, y1: 8, y2: box.height - 22 }),
      ...here.map(([, point], i) => drawn("circle", { class: `dot c${series.findIndex((s) => s.name === here[i][0]) % 6}`, cx: point[2], cy: point[3], r: 3.5 })),
      ...lines.map((text, i) => drawn("text", { x: left + (end ? -8 : 8), y: box.height - 30 - 13 * (lines.length - 1 - i), "text-anchor": end ? "end" : "start" }, text)));
  });
  chart.addEventListener("pointerleave", () => probe.replaceChildren());
  chart.addEventListener("click", () => { if (step !== null) location.href = `step?step=${step}`; });
}

// While the run goes on, the overview loads itself again every ten seconds, if nobody is typing or selecting.
if (document.body.dataset.live === "yes") {
  setInterval(() => {
    if (document.visibilityState === "visible" && !getSelection().toString() && !byId("keys").open) location.reload();
  }, 10000);
}
