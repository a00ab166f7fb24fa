// The engine at work: what GET /live sends, drawn. Nothing is asked for while the page is hidden or paused.

import { events } from "./api.js";
import { nameOf } from "./chat.js";
import { $, made } from "./nodes.js";

const MINUTE = 60;
const CELLS = [3, 7]; // pixels of a step, with the gap to the next: at least and at most
const SQUARE = 5; // pixels of a sequence's block, with the gap to the next
const MAX_COLUMNS = 480; // that are kept
const MAX_ENDED = 8; // rows of sequences that have ended, while their steps are still in sight
const STATES = {
  d: "decode", p: "prefill", w: "waiting", x: "preempted", h: "held back",
};

let engines = new Map();
let rates = [];
let clock = { at: 0, since: 0 }; // the last tick's time, and when it came
let shown = 0; // the engine whose batch and cache are shown
let colours = {};
let drawn = 0; // when
const isCalm = matchMedia("(prefers-reduced-motion: reduce)");

// Watch until stopped. `hello` gets what the server says of itself, null once it is gone; `onEngines` gets how
// many engines are ready.
export function startLive({ hello, onEngines, onUnauthenticated }) {
  let controller = null;
  let isPaused = false;
  let retry = 0;

  async function watch() {
    if (controller || isPaused || document.hidden) return;
    clearTimeout(retry);
    const own = (controller = new AbortController());
    let pause = 2000;
    try {
      for await (const { event, data } of events("/live", { signal: own.signal })) {
        if (event === "hello") {
          forget();
          hello(JSON.parse(data));
          trouble("");
        } else {
          for (const tick of JSON.parse(data)) take(tick);
          onEngines(engines.size);
          if (!isCalm.matches || performance.now() - drawn > 1000) draw();
        }
      }
      trouble("The server has ended the live view. Trying again.");
    } catch (error) {
      if (error.name !== "AbortError") {
        trouble(`${error.message} The live view stands still.`);
        hello(null);
        if (error.status === 401) {
          onUnauthenticated();
          pause = Infinity; // until there is a token
        } else if (error.retryAfter) pause = Math.max(pause, 1e3 * error.retryAfter);
      }
    } finally {
      if (controller === own) controller = null;
    }
    if (!own.signal.aborted && pause < Infinity) retry = setTimeout(watch, pause);
  }

  function stop() {
    clearTimeout(retry);
    controller?.abort();
    controller = null;
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : watch()));
  $("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    $("pause").textContent = isPaused ? "Resume" : "Pause";
    if (isPaused) stop();
    else watch();
  });
  $("which").addEventListener("change", () => {
    shown = Number($("which").value);
    $("rows").replaceChildren();
    draw();
  });
  new ResizeObserver(draw).observe($("engine"));
  setInterval(() => !document.hidden && !isPaused && drawRates(), 1000);
  watch();
  return { restart() { stop(); watch(); } };
}

// Colours come from the legend, so that each is named once, in the style sheet.
export function readColours() {
  colours = {};
  for (const swatch of document.querySelectorAll(".swatch")) {
    const style = getComputedStyle(swatch);
    colours[swatch.classList[1]] = swatch.matches(".waiting, .preempted") ? style.color : style.backgroundColor;
  }
  draw();
}

function trouble(text) {
  $("trouble").hidden = !text;
  if ($("trouble").textContent !== text) $("trouble").textContent = text;
}

// -- what the server sends --------------------------------------------------------------------------------------------

function forget() {
  engines = new Map();
  rates = [];
  $("rows").replaceChildren();
}

function take(tick) {
  clock = { at: tick.at, since: performance.now() };
  for (const [age, tokens, prompt, itl, ttft] of tick.rates) rates.push({ at: tick.at - age, tokens, prompt, itl, ttft });
  rates = rates.filter((rate) => rate.at > tick.at - MINUTE - 1);
  if (!tick.engines) return;
  clock.tick = tick;
  for (const seen of tick.engines) {
    let engine = engines.get(seen.engine);
    if (engine?.epoch !== seen.epoch) {
      drop(engine?.rows);
      engine = { columns: 0, rows: new Map() };
      engines.set(seen.engine, engine);
    }
    Object.assign(engine, { blocks: null, adapters: null, ...seen, rows: engine.rows, columns: engine.columns });
    const ids = new Set(seen.rows?.map(([id]) => id));
    if (seen.rows) drop(engine.rows, (row) => isLive(row) && !ids.has(row.id)); // their ends were not seen
    // Sequences after a pause begin a new picture.
    if (![...engine.rows.values()].some(isLive) && [...ids].some((id) => !engine.rows.has(id))) drop(engine.rows);
    for (const [id, state, prompt, tokens, computed, tenant, request, cells] of seen.rows ?? []) {
      const row = engine.rows.get(id) ?? { id, start: engine.columns, cells: "" };
      Object.assign(row, { state, prompt, tokens, computed, tenant, request });
      if (!row.cells) row.start = engine.columns + (cells.length - cells.replace(/^\.+/, "").length);
      row.cells = row.cells ? (row.cells + cells).slice(-MAX_COLUMNS) : cells.replace(/^\.+/, "");
      row.start = Math.max(row.start, engine.columns + seen.columns - MAX_COLUMNS);
      engine.rows.set(id, row);
    }
    engine.columns += seen.columns ?? 0;
  }
  for (const [id, engine] of [...engines]) {
    if (tick.engines.some((seen) => seen.engine === id)) continue;
    drop(engine.rows);
    engines.delete(id);
  }
}

function drop(rows = new Map(), isDropped = () => true) {
  for (const row of [...rows.values()].filter(isDropped)) {
    rows.delete(row.id);
    row.node?.remove();
  }
}

const isLive = (row) => row.state in STATES;

// -- drawing ----------------------------------------------------------------------------------------------------------

function draw() {
  drawn = performance.now();
  drawRates();
  if (!clock.tick) return;
  drawEngines();
  const engine = engines.get(shown);
  drawBatch(engine);
  drawCache(engine);
  drawAdapters();
  drawTenants(clock.tick);
}

function drawEngines() {
  const ids = [...engines.keys()].sort((a, b) => a - b);
  if (!engines.has(shown) && ids.length) shown = ids[0];
  const which = $("which");
  which.hidden = ids.length < 2;
  const titles = ids.map((id) => {
    const { name, node } = engines.get(id);
    return `Engine ${name || id}${node ? ` on ${node}` : ""}`;
  });
  if (which.dataset.titles !== titles.join()) {
    which.dataset.titles = titles.join();
    which.replaceChildren(...ids.map((id, at) => new Option(titles[at], id, false, id === shown)));
  }
}

function drawBatch(engine) {
  const rows = engine ? [...engine.rows.values()] : [];
  const width = $("rows").querySelector(".lane")?.clientWidth || 400;
  const inSight = Math.floor(width / CELLS[0]);
  const ended = rows.filter((row) => !isLive(row));
  const isOut = (row) => row.start + row.cells.length <= engine.columns - inSight || ended.indexOf(row) < ended.length - MAX_ENDED;
  drop(engine?.rows, (row) => !isLive(row) && isOut(row));
  // Steps are as wide as lets all rows be seen from their first step on.
  const steps = engine ? engine.columns - Math.min(...[...engine.rows.values()].map((row) => row.start)) : 0;
  const cell = Math.max(CELLS[0], Math.min(CELLS[1], Math.floor(width / steps)));
  for (const row of rows) if (engine.rows.has(row.id)) drawRow(engine, row, cell);
  $("batch").hidden = !engine?.rows.size;
  $("batch-empty").hidden = Boolean(engine?.rows.size);
  setText("batch-count", engine ? `${engine.running} running, ${engine.waiting} waiting` : "no engine is ready");
  const more = [];
  if (engine?.others) more.push(`${engine.others} more ${engine.others === 1 ? "sequence is" : "sequences are"} not shown.`);
  if (engine?.waiting && HOLDS[engine.hold]) more.push(`The next in line waits because ${HOLDS[engine.hold]}.`);
  if (engine?.preemptions) more.push(`${engine.preemptions} preemptions since the engine started.`);
  $("batch-more").hidden = !more.length;
  setText("batch-more", more.join(" "));
}

const HOLDS = {
  "no place": "as many sequences run as the engine allows",
  "no blocks": "the cache has too few free blocks",
  "no budget": "others use up the tokens that a step may compute",
  late: "its deadline can no longer be met",
  "no adapter": "running sequences use every slot for LoRA adapters",
};

function drawRow(engine, row, cell) {
  if (!row.node?.isConnected) {
    row.node = made("div", "row", "");
    row.node.setAttribute("role", "row");
    row.title = made("span", "name", "");
    row.about = made("span", "about", "");
    const label = made("span", "label", "");
    label.append(row.title, row.about);
    row.blocks = document.createElement("canvas");
    row.blocks.className = "blocks";
    row.blocks.setAttribute("role", "img");
    row.lane = document.createElement("canvas");
    row.lane.className = "lane";
    row.lane.setAttribute("role", "img");
    for (const part of [label, row.blocks, row.lane]) {
      const cell = part === label ? label : made("span", "", "");
      if (cell !== part) cell.append(part);
      cell.setAttribute("role", "cell");
      row.node.append(cell);
    }
    $("rows").append(row.node);
  }
  const state = STATES[row.state] ?? row.state;
  row.node.classList.toggle("ended", !isLive(row));
  const name = nameOf(row.request);
  const title = `#${row.id} ${name ?? (row.tenant ? `of ${row.tenant}` : row.request.slice(0, 12))}`;
  if (row.title.textContent !== title) row.title.textContent = row.title.title = title;
  const output = row.tokens - row.prompt;
  const tokens = row.state === "p" || (row.state === "h" && !output)
    ? `${number(row.computed)} of ${number(row.tokens)} tokens`
    : `${number(row.prompt)} + ${number(output)} tokens`;
  const about = `${state} · ${tokens}${name && row.tenant ? ` · ${row.tenant}` : ""}`;
  if (row.about.textContent !== about) row.about.textContent = about;
  drawLane(engine, row, cell, state);
  drawBlocks(engine, row);
}

function drawLane(engine, row, cell, state) {
  const [pen, width, height] = canvas(row.lane);
  const visible = Math.floor(width / cell);
  const first = engine.columns - visible;
  const left = width - visible * cell;
  for (let column = Math.max(first, row.start); column < engine.columns; column += 1) {
    const doing = row.cells[column - row.start];
    const x = left + (column - first) * cell;
    if (doing === "d" || doing === "p") {
      pen.fillStyle = doing === "d" ? colours.decode : colours.prefill;
      pen.fillRect(x, 0, cell - 1, height);
    } else if (doing === "w") {
      pen.fillStyle = colours.waiting;
      pen.fillRect(x, height / 2 - 1, cell, 2);
    } else if (doing === "x") {
      pen.fillStyle = colours.preempted;
      pen.fillRect(x, 2, cell, 2);
      pen.fillRect(x, height - 4, cell, 2);
    } else if (doing === "h") {
      pen.fillStyle = colours.decode;
      pen.fillRect(x, height - 2, cell, 2);
    }
  }
  const label = `${row.cells.length} steps, now ${state}`;
  if (row.lane.dataset.state !== state) {
    row.lane.dataset.state = state;
    row.lane.setAttribute("aria-label", label);
  }
}

// The sequence's block table: each block as a square, filled as far as its slots hold tokens.
function drawBlocks(engine, row) {
  const size = engine.block_size || 16;
  const holds = isLive(row) && row.state !== "w" && row.state !== "x";
  const count = holds ? Math.max(1, Math.ceil(row.computed / size)) : 0;
  const [pen, width, height] = canvas(row.blocks);
  const [across, down] = [Math.floor((width + 1) / SQUARE), Math.floor((height + 1) / SQUARE)];
  const each = Math.max(1, Math.ceil(count / (across * down))); // blocks that a square stands for
  const drawn = Math.ceil(count / each);
  const top = Math.round((height - SQUARE * Math.ceil(drawn / across)) / 2);
  const side = SQUARE - 1;
  for (let at = 0; at < drawn; at += 1) {
    const [x, y] = [(at % across) * SQUARE, top + Math.floor(at / across) * SQUARE];
    const isLast = at === drawn - 1 && each === 1;
    const slots = isLast ? row.computed - (count - 1) * size : size;
    pen.fillStyle = colours.evictable;
    pen.fillRect(x, y, side, side);
    pen.fillStyle = colours.referenced;
    pen.fillRect(x, y, Math.max(1, Math.round((side * slots) / size)), side);
  }
  const label = count ? `${count} blocks` : "no blocks";
  if (row.blocks.getAttribute("aria-label") !== label) row.blocks.setAttribute("aria-label", label);
}

function drawCache(engine) {
  const node = $("cache");
  const isTold = Boolean(engine?.blocks);
  node.hidden = $("cache-legend").hidden = !isTold;
  if (!isTold) {
    setText("cache-count", "");
    setText("cache-caption", engine ? "Your token does not show how full the cache is: that needs the right to observe." : "");
    return;
  }
  const [total, free, evictable] = engine.blocks;
  const referenced = total - free - evictable;
  let width = node.parentElement.clientWidth;
  // The largest cells with which every block has its own, else cells that stand for several.
  let cell = 12;
  const rowsOf = (count) => Math.ceil(count / Math.floor(width / cell));
  while (cell > 4 && rowsOf(total) * cell > 150) cell -= 1;
  const each = Math.max(1, Math.ceil(total / (Math.floor(width / cell) * Math.floor(168 / cell))));
  const across = Math.floor(width / cell);
  const cells = Math.ceil(total / each);
  node.style.height = `${Math.ceil(cells / across) * cell}px`;
  const [pen] = canvas(node);
  const gap = cell > 5 ? 2 : 1;
  for (let at = 0; at < cells; at += 1) {
    const block = at * each;
    pen.fillStyle = block < referenced ? colours.referenced : block < referenced + evictable ? colours.evictable : colours.free;
    pen.fillRect((at % across) * cell, Math.floor(at / across) * cell, cell - gap, cell - gap);
  }
  setText("cache-count", `${number(referenced)} of ${number(total)} blocks in use`);
  setText("referenced", number(referenced));
  setText("evictable", number(evictable));
  setText("free", number(free));
  setText(
    "cache-caption",
    `Keys and values live in blocks of ${engine.block_size} tokens. A sequence takes the next block only when its last one is full, `
      + "and gives all back when it ends, so hardly any memory is set aside for tokens that may never come. Blocks that begin with "
      + `the same prompt are shared and stay cached. ${each === 1 ? "Each cell is a block." : `Each cell is ${each} blocks.`}`,
  );
}

// Each adapter once, with the engines that hold it and the requests of them all.
function drawAdapters() {
  const held = new Map();
  for (const [id, engine] of engines) {
    for (const [name, running, waiting] of engine.adapters ?? []) {
      const adapter = held.get(name) ?? { on: [], running: 0, waiting: 0 };
      adapter.on.push(engine.name || id);
      adapter.running += running ?? NaN; // not shown to this caller
      adapter.waiting += waiting ?? NaN;
      held.set(name, adapter);
    }
  }
  const rows = [...held].sort(([a], [b]) => a.localeCompare(b)).map(([name, { on, running, waiting }]) => [
    name,
    engines.size > 1 ? `on ${on.length === 1 ? "engine" : "engines"} ${on.join(", ")}` : "",
    Number.isNaN(running) ? "" : `${running} running, ${waiting} waiting`,
  ]);
  $("adapters-section").hidden = !rows.length;
  setText("adapters-count", `${rows.length} loaded`);
  const list = $("adapters");
  const text = JSON.stringify(rows);
  if (list.dataset.shown === text) return;
  list.dataset.shown = text;
  list.replaceChildren(...rows.map(([name, on, requests]) =>
    made("li", "", made("span", "name", name), made("span", "fine", on), made("span", "fine", requests))));
}

function drawTenants(tick) {
  const list = $("tenants");
  const rows = tick.tenants.map(([name, running, waiting, share]) => {
    const bar = made("span", "bar", document.createElement("i"));
    bar.firstChild.style.width = `${100 * share}%`;
    for (const [key, value] of [["role", "meter"], ["aria-valuemin", 0], ["aria-valuemax", 100],
      ["aria-valuenow", Math.round(100 * share)], ["aria-label", `Share of ${name || "calls without a tenant"}`]]) {
      bar.setAttribute(key, value);
    }
    return made("li", "",
      made("span", "name", name || "without a tenant"), bar,
      made("span", "share", `${(100 * share).toFixed(0)} %`),
      made("span", "fine", `${running} running, ${waiting} waiting`));
  });
  const text = JSON.stringify(tick.tenants);
  if (list.dataset.shown !== text) {
    list.dataset.shown = text;
    list.replaceChildren(...rows);
  }
  $("tenants-empty").hidden = rows.length > 0;
  const others = tick.num_tenants - rows.length;
  setText("tenants-count", others > 0 ? `and ${others} ${others === 1 ? "other" : "others"}` : "");
}

// -- the last minute --------------------------------------------------------------------------------------------------

const WIDTH = 240;
const HEIGHT = 56;

function drawRates() {
  if (!clock.at) return;
  const now = clock.at + (performance.now() - clock.since) / 1e3;
  const since = now - MINUTE;
  const tokens = new Array(MINUTE).fill(0);
  const gaps = Array.from({ length: MINUTE }, () => []);
  const dots = [];
  let [recent, prompts] = [0, 0];
  for (const rate of rates) {
    if (rate.at <= since) continue;
    const second = Math.min(MINUTE - 1, Math.floor(rate.at - since));
    tokens[second] += rate.tokens;
    gaps[second].push(...rate.itl);
    for (const ms of rate.ttft) dots.push([rate.at - since, ms]);
    if (rate.at > now - 2) [recent, prompts] = [recent + rate.tokens, prompts + rate.prompt];
  }
  setText("rate", number(Math.round(recent / 2)));
  setText("rate-more", prompts ? `and ${number(Math.round(prompts / 2))} prompt tokens` : "of answers");
  bars($("rate-chart"), tokens);

  const ttft = percentiles(dots.map(([, ms]) => [ms, 1]));
  showPercentiles("ttft", ttft);
  const topOfDots = Math.max(1, ...dots.map(([, ms]) => ms));
  setText("ttft-count", dots.length ? `${number(dots.length)} ${dots.length === 1 ? "sequence" : "sequences"}` : "each dot is a sequence");
  setText("ttft-top", dots.length ? `up to ${milliseconds(topOfDots)}` : "");
  paths($("ttft-chart"), [["dots", dots.map(([at, ms]) => `M${x(at)} ${y(ms, topOfDots)}h0`).join("")]]);

  showPercentiles("itl", percentiles(gaps.flat()));
  const seconds = gaps.map(percentiles);
  const top = Math.max(1, ...seconds.filter(Boolean).map(([, p95]) => p95));
  setText("itl-top", seconds.some(Boolean) ? `up to ${milliseconds(top)}` : "");
  paths($("itl-chart"), [
    ["p95", line(seconds.map((each) => each?.[1]), top)],
    ["p50", line(seconds.map((each) => each?.[0]), top)],
  ]);
}

const x = (second) => ((WIDTH * second) / MINUTE).toFixed(1);
const y = (value, top) => (HEIGHT - 3 - ((HEIGHT - 6) * value) / top).toFixed(1);

function showPercentiles(id, found) {
  setText(id, found ? milliseconds(found[0]) : "–");
  setText(`${id}-more`, found ? `median, p95 ${milliseconds(found[1])}` : "of the last minute");
}

// The median and the 95th percentile of [value, how often]; null of none.
function percentiles(weighted) {
  const sorted = [...weighted].sort((a, b) => a[0] - b[0]);
  const total = sorted.reduce((sum, [, times]) => sum + times, 0);
  if (!total) return null;
  return [0.5, 0.95].map((part) => {
    let left = part * total;
    return sorted.find(([, times]) => (left -= times) <= 0)?.[0] ?? sorted.at(-1)[0];
  });
}

function bars(svg, values) {
  const top = Math.max(1, ...values);
  const width = WIDTH / values.length;
  const path = values.map((value, at) =>
    value ? `M${(at * width).toFixed(1)} ${HEIGHT}V${y(value, top)}h${(width - 1).toFixed(1)}V${HEIGHT}z` : "").join("");
  paths(svg, [["bars", path]]);
}

function line(values, top) {
  let isDown = false;
  return values.map((value, at) => {
    if (value === undefined) {
      isDown = false;
      return "";
    }
    const to = `${isDown ? "L" : "M"}${x(at + 0.5)} ${y(value, top)}`;
    const isAlone = !isDown && values[at + 1] === undefined;
    isDown = true;
    return isAlone ? `${to}h0` : to;
  }).join("");
}

function paths(svg, list) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  for (const [name, d] of list) {
    let path = svg.querySelector(`.${name}`);
    if (!path) {
      path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", name);
      path.setAttribute("vector-effect", "non-scaling-stroke");
      svg.append(path);
    }
    path.setAttribute("d", d);
  }
}

// -- pieces -----------------------------------------------------------------------------------------------------------

function setText(id, text) {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
}

const number = (value) => value.toLocaleString("en");
const milliseconds = (value) =>
  value >= 1e3 ? `${(value / 1e3).toFixed(value >= 1e4 ? 0 : 1)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;

// A cleared canvas in the size of its box, with the pixels of the screen.
function canvas(node) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [node.clientWidth, node.clientHeight];
  if (node.width !== Math.round(width * ratio) || node.height !== Math.round(height * ratio)) {
    node.width = Math.round(width * ratio);
    node.height = Math.round(height * ratio);
  }
  const pen = node.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width, height];
}
