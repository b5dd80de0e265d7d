// The playground: asks the server, shows what comes, and keeps what came so that it can be saved and opened again.

import { ask, card } from "./api.js";
import { chart, tree } from "./draw.js";
import { TokenText } from "./text.js";
import { Sums, checked } from "./trace.js";

const $ = (id) => document.getElementById(id);
const settings = $("settings").elements;
const panes = Object.fromEntries(
  [["output", "output"], ["plain", "lane-plain"], ["guessed", "lane-guessed"]].map(([name, id]) => [
    name, new TokenText($(id), $("card"), showCycle),
  ]),
);
const state = { mode: "chat", messages: [], traces: [], running: null };

function showCycle(cycle) {
  const count = cycle.nodes.length;
  $("cycle-text").textContent = count
    ? `${count} guessed, ${cycle.accepted} accepted, ${cycle.tokens.length} tokens delivered`
    : "Nothing was guessed in this cycle.";
  tree($("tree"), cycle);
}

function showSums(sums) {
  const last = sums.rows[sums.rows.length - 1];
  $("f-tokens").textContent = sums.tokens;
  $("f-speed").textContent = last?.speed?.toFixed(1) ?? "–";
  $("f-tau").textContent = sums.tau?.toFixed(2) ?? "–";
  $("f-accepted").textContent = sums.drafted ? `${Math.round((100 * sums.accepted) / sums.drafted)} %` : "–";
  $("f-speed-up").textContent = sums.speedUp ? `${sums.speedUp.ratio.toFixed(2)} times` : "–";
  $("f-bounds").textContent = sums.speedUp ? bounds(sums.speedUp) : "";
  chart($("chart-tau"), sums.rows.map((row) => row.count), sums.rows.map((row) => row.tau),
    `Tokens of each cycle, tau ${sums.tau?.toFixed(2) ?? "unknown"}`);
  chart($("chart-speed"), [], sums.rows.map((row) => row.speed), `${last?.speed?.toFixed(1) ?? "?"} tokens per second`);
  const rates = sums.guessedAt.map((guessed, depth) => sums.acceptedAt[depth] / guessed);
  const said = rates.map((rate, depth) => `${depth + 1}: ${Math.round(rate * 100)} %`).join(", ");
  chart($("chart-depth"), rates, [], `Acceptance by depth ${said || "unknown"}`);
}

function bounds({ low, high }) {
  return `${low.toFixed(2)} to ${high.toFixed(2)}`;
}

function bodyOf(prompt) {
  const number = (name) => (settings[name].value === "" ? undefined : Number(settings[name].value));
  const body = {
    temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed"),
    speculation: { enabled: settings.enabled.checked, depth: number("depth"), width: number("width") },
  };
  if (settings.json.checked) body.response_format = { type: "json_object" };
  if (state.mode === "completion") return ["/v1/completions", { ...body, prompt }];
  const opening = settings.system.value ? [{ role: "system", content: settings.system.value }] : [];
  const messages = [...opening, ...(state.mode === "chat" ? state.messages : []), { role: "user", content: prompt }];
  return ["/v1/chat/completions", { ...body, messages }];
}

/** Runs one request, hands its cycles to `show` as they come, and returns what it was. */
async function run(prompt, change, show) {
  const [path, body] = bodyOf(prompt);
  const cycles = [];
  const asked = { ...body, ...change, speculation: { ...body.speculation, ...change.speculation } };
  const { signal } = state.running;
  const stream = ask(path, asked, settings.key.value, signal);
  for (;;) {
    const { value, done } = await stream.next();
    signal.throwIfAborted(); // what had come before is not shown behind it
    if (done) return { prompt, path, asked, cycles, ...value };
    cycles.push(value);
    show(value, cycles);
  }
}

async function single(prompt) {
  const pane = panes.output;
  if (state.mode === "completion") pane.clear();
  else pane.begin();
  pane.say(prompt);
  const sums = new Sums();
  const first = pane.tokens.length;
  const trace = await run(prompt, {}, (cycle) => {
    sums.add(cycle);
    pane.add(cycle);
    showSums(sums);
  });
  if (state.mode === "chat") {
    const text = pane.tokens.slice(first).map((token) => token.text).join("");
    state.messages.push({ role: "user", content: prompt }, { role: "assistant", content: text });
  }
  state.traces = [trace];
}

/**
 * One after the other, so that neither slows the other down; then both are shown again side by side, as they were from
 * their first tokens on: whoever runs second finds the prompt's keys cached.
 */
async function race(prompt) {
  const seed = settings.seed.value === "" ? Math.floor(Math.random() * 2 ** 32) : Number(settings.seed.value);
  $("verdict").textContent = "Measuring each alone…";
  const traces = [];
  for (const [name, enabled] of [["plain", false], ["guessed", true]]) {
    panes[name].clear();
    traces.push(await run(prompt, { seed, speculation: { enabled } }, (cycle, cycles) => {
      $(`clock-${name}`).textContent = `${cycles.length} passes, ${cycle.at.toFixed(2)} s`;
    }));
  }
  if (traces.some((trace) => !trace.cycles.length)) throw new Error("Nothing was said: there is nothing to race.");
  state.traces = traces;
  await replay(traces, state.running.signal);
}

async function replay(traces, signal) {
  const names = ["plain", "guessed"];
  const sums = new Sums();
  names.forEach((name) => panes[name].clear());
  const began = performance.now();
  const next = [0, 0];
  const since = (i, cycle) => cycle.at - traces[i].cycles[0].at;
  while (next.some((place, i) => place < traces[i].cycles.length) && !signal.aborted) {
    const now = (performance.now() - began) / 1000;
    names.forEach((name, i) => {
      const { cycles } = traces[i];
      while (next[i] < cycles.length && since(i, cycles[next[i]]) <= now) {
        panes[name].add(cycles[next[i]]);
        if (i === 1) sums.add(cycles[next[i]]);
        next[i] += 1;
      }
      const isDone = next[i] === cycles.length;
      const at = isDone ? since(i, cycles[cycles.length - 1]) : now;
      $(`clock-${name}`).textContent = `${at.toFixed(2)} s, ${next[i]} passes${isDone ? ", done" : ""}`;
    });
    showSums(sums);
    await new Promise((resolve) => { setTimeout(resolve, 16); });
  }
  if (signal.aborted) return;
  const [plain, guessed] = traces.map((trace, i) => since(i, trace.cycles[trace.cycles.length - 1]));
  const same = panes.plain.text === panes.guessed.text ? "the same text" : "DIFFERENT TEXTS";
  const ratio = guessed > 0 ? `${(plain / guessed).toFixed(2)} times as fast` : "too short to tell";
  const guess = sums.speedUp ? ` Estimated without the plain run: ${sums.speedUp.ratio.toFixed(2)} (${bounds(sums.speedUp)}).` : "";
  $("verdict").textContent = `${ratio}, ${same}. Each was measured alone, from its first token on.${guess}`;
}

async function show(traces) {
  const isRace = traces.length === 2;
  choose(isRace ? "race" : traces[0].path.includes("chat") ? "chat" : "completion");
  state.traces = traces;
  if (isRace) {
    state.running = new AbortController();
    await replay(traces, state.running.signal);
    return;
  }
  const [trace] = traces;
  const sums = new Sums();
  panes.output.clear();
  panes.output.say(trace.prompt);
  for (const cycle of trace.cycles) {
    sums.add(cycle);
    panes.output.add(cycle);
  }
  showSums(sums);
}

function choose(mode) {
  state.mode = mode;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isChosen = tab.dataset.mode === mode;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    if (isChosen) $("stage").setAttribute("aria-labelledby", tab.id);
  }
  $("race").hidden = mode !== "race";
  $("output").hidden = mode === "race";
  clear();
}

function clear() {
  state.running?.abort();
  state.messages = [];
  Object.values(panes).forEach((pane) => pane.clear());
  for (const id of ["verdict", "clock-plain", "clock-guessed"]) $(id).textContent = "";
  $("tree").replaceChildren();
  $("cycle-text").textContent = "Choose a token to see the tree that it came from.";
  showSums(new Sums());
}

/** Runs something that may fail; what it said then is shown, and the buttons are as they should be either way. */
async function guard(work, asked = "") {
  $("problem").hidden = true;
  $("send").disabled = true;
  $("stop").disabled = false;
  try {
    await work();
  } catch (error) {
    if (error.name !== "AbortError") {
      if (!$("prompt").value) $("prompt").value = asked;
      $("problem").textContent = error.message;
      $("problem").hidden = false;
    }
  } finally {
    state.running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    $("save").disabled = !state.traces.length;
  }
}

function send() {
  if (state.running || !$("ask").reportValidity() || !$("settings").reportValidity()) return;
  const prompt = $("prompt").value;
  state.running = new AbortController();
  if (state.mode === "chat") $("prompt").value = "";
  guard(() => (state.mode === "race" ? race(prompt) : single(prompt)), prompt);
}

function save() {
  const link = document.createElement("a");
  const kept = JSON.stringify({ kind: "outrider trace", version: 1, traces: state.traces });
  link.href = URL.createObjectURL(new Blob([kept], { type: "application/json" }));
  link.download = "outrider-trace.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function open(file) {
  await show(checked(await file.text()));
}

async function greet() {
  try {
    const model = await card(settings.key.value);
    $("model").textContent = `${model.id}, drafter ${model.drafter}, exact by ${model.exactness}`;
  } catch (error) {
    $("model").textContent = error.message;
  }
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", () => state.running?.abort());
$("clear").addEventListener("click", clear);
$("save").addEventListener("click", save);
$("open").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file && !state.running) guard(() => open(file));
});
$("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
});
const tabs = [...document.querySelectorAll("[role=tab]")];
tabs.forEach((tab, place) => {
  tab.addEventListener("click", () => { if (!state.running) choose(tab.dataset.mode); });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || state.running) return;
    const next = tabs[(place + step + tabs.length) % tabs.length];
    choose(next.dataset.mode);
    next.focus();
  });
});
settings.key.addEventListener("change", greet);
clear();
greet();
