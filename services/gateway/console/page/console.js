// The console: asks /console/state once per interval and writes what it says into the page.
// Text from outside is only ever set as textContent, and no markup is made of it.

const POLL_MS = 1000;
// A gateway that is away is asked less often, so that one that returns is not met by every open page at once.
const AWAY_MS = 3000;
// Longer than the gateway itself waits for queue and scheduler: one that is silent for so long is away.
const ANSWER_MS = 10000;
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 6;
const SEE_ALL = "penstock status --once";
// In the place of a channel's name, which is never a blank: those that hold least of a worker, taken together.
const OTHERS = " ";

const byId = (id) => document.getElementById(id);

// ---- numbers as text ----

const number = (value, digits = 0) =>
  value === null || value === undefined
    ? "–"
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

const age = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
};

const milliseconds = (ms) => (ms >= 10000 ? `${number(ms / 1000, 1)} s` : `${number(ms, ms < 100 ? 1 : 0)} ms`);
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const percent = (share) => `${Math.round(share * 100)} %`;
const notTold = (who) => `Not known: the ${who} does not say.`;

// ---- elements ----

// Set only what differs: a screen reader and a selection stay where they are.
const say = (element, text) => {
  if (element.textContent !== String(text)) element.textContent = text;
};

const set = (element, name, value) => {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
};

const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

const draw = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

const canvas = (className, label, ...children) =>
  draw("svg", { class: className, viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...children);

// One child of `parent` per item, kept from frame to frame by its key, so that focus stays where it is.
const keyed = (parent, items, keyOf, create, update) => {
  const wanted = new Set(items.map(keyOf));
  // What goes goes first: an element that is moved loses the focus, and then none that stays has to move.
  for (const child of [...parent.children]) if (!wanted.has(child.dataset.key)) child.remove();
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = old.get(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
};

const part = (element, name) => element.querySelector(`[data-part="${name}"]`);

// ---- bars and lines ----

const colours = new Map();
const colourOf = (channel) => channel === OTHERS ? "others" : `c${(colours.get(channel) ?? COLOURS - 1) % COLOURS}`;

// A stacked bar: each part of `whole` in its colour, what is free in the colour of the track. Parts of more than
// there is, as requests may hold that share blocks, fill it among them.
const stack = (svg, parts, whole) => {
  const full = Math.max(whole, parts.reduce((sum, one) => sum + one.blocks, 0));
  let left = 0;
  keyed(svg, parts, (one) => one.name, () => draw("rect", { y: 0, height: 100 }), (rect, one) => {
    const width = full ? (100 * one.blocks) / full : 0;
    set(rect, "class", colourOf(one.name));
    set(rect, "x", left.toFixed(2));
    set(rect, "width", width.toFixed(2));
    left += width;
  });
};

// One line per stretch without a gap; time runs to the right.
const usageLines = (svg, ages, usage, now) => {
  const span = Math.max(60, ages[0] ?? 0);
  const runs = [[]];
  usage.forEach((value, place) => {
    if (value === null) runs.push([]);
    else runs.at(-1).push(`${(100 * (1 - ages[place] / span)).toFixed(1)},${(98 - 96 * value).toFixed(1)}`);
  });
  if (now !== null) runs.at(-1).push(`100,${(98 - 96 * now).toFixed(1)}`);
  const lines = runs.filter((run) => run.length).map((run, place) => ({ key: `run-${place}`, points: run.join(" ") }));
  keyed(svg.querySelector("g"), lines, (line) => line.key, () => draw("polyline"), (element, line) => set(element, "points", line.points));
  return span;
};

// ---- sections ----

const showTotals = (fleet) => {
  for (const element of document.querySelectorAll("[data-total]")) {
    const name = element.dataset.total;
    say(element, number(fleet[name], name === "requests_per_s" ? 1 : 0));
  }
  say(byId("policy"), fleet.policy ? `Admission policy: ${fleet.policy}.` : "");
};

// How many more there are than the page shows, of what kinds, and who has them.
const showMore = (id, more, where, kinds = "") => {
  byId(id).hidden = more <= 0;
  say(byId(id), `${number(more)} more${kinds && ` (${kinds})`}; ${where} has all.`);
};

const showProblems = (state) => {
  keyed(byId("problems"), state.problems, (text) => text, () => make("li"), (item, text) => say(item, text));
  showMore("more-problems", state.problems_left_out, SEE_ALL);
};

const createChannel = (channel) =>
  make("tr", {},
    make("th", { scope: "row" }, make("span", { class: `swatch ${colourOf(channel.name)}` }), channel.name),
    ...["waiting", "oldest", "running", "held"].map((name) => make("td", { class: "number", "data-part": name })),
    make("td", { class: "wide" }, canvas("bar", "")),
    ...["requests", "tokens"].map((name) => make("td", { class: "number", "data-part": name })));

const showChannels = (state) => {
  state.channels.forEach((channel) => {
    if (!colours.has(channel.name)) colours.set(channel.name, colours.size);
  });
  // Of all workers: of a large fleet only some are shown.
  const capacity = state.fleet.capacity_blocks;
  keyed(byId("channel-rows"), state.channels, (c) => c.name, createChannel, (row, channel) => {
    say(part(row, "waiting"), number(channel.waiting));
    say(part(row, "oldest"), channel.waiting === 0 ? "–" : age(channel.oldest_s));
    say(part(row, "running"), number(channel.running));
    say(part(row, "held"), number(channel.held_blocks));
    say(part(row, "requests"), number(channel.requests_per_s, 1));
    say(part(row, "tokens"), number(channel.tokens_per_s));
    const bar = row.querySelector("svg");
    set(bar, "aria-label", `${number(channel.held_blocks)} of ${number(capacity)} blocks`);
    stack(bar, [{ name: channel.name, blocks: channel.held_blocks ?? 0 }], capacity);
  });
  showMore("more-channels", state.channels_left_out, SEE_ALL);
};

const createTenant = (tenant) =>
  make("tr", {}, make("th", { scope: "row" }, tenant.name || "–"),
    ...["requests", "bytes"].map((name) => make("td", { class: "number", "data-part": name })));

const showTenants = (tenants) => {
  byId("tenants").hidden = tenants.length === 0;
  keyed(byId("tenant-rows"), tenants, (tenant) => tenant.name, createTenant, (row, tenant) => {
    say(part(row, "requests"), number(tenant.requests));
    say(part(row, "bytes"), number(tenant.bytes / 1e6, 1));
  });
};

const showDeparted = (state) => {
  byId("departed").hidden = state.departed.length === 0;
  keyed(byId("departed-rows"), state.departed, (worker) => worker.name, () => make("li"), (item, worker) =>
    say(item, `${worker.name}: ${worker.was ? `${worker.was} until ` : ""}${age(worker.ago_s)} ago${worker.model ? `, ${worker.model}` : ""}`));
  byId("more-departed").hidden = state.departed_left_out === 0;
  say(byId("more-departed"), `and ${number(state.departed_left_out)} more`);
};

const fact = (name, label) => make("div", {}, make("dt", {}, label), make("dd", { "data-part": name }));

const createWorker = (worker) => {
  const button = make("button", { type: "button", "data-part": "button" });
  button.addEventListener("click", () => turnWorker(worker.name, button));
  return make("li", { class: "card" },
    make("div", { class: "top" },
      make("h3", {}, worker.name), make("span", { "data-part": "state" }), make("span", { class: "quiet", "data-part": "model" }), button),
    canvas("bar", ""),
    make("div", { class: "held", "data-part": "held" }),
    make("dl", { class: "facts" },
      fact("engine", "in engine"), fact("usage", "KV usage"), fact("drift", "drift"), fact("preemptions", "preempted"), fact("step", "step")),
    make("div", {},
      canvas("line", "", draw("line", { x1: 0, x2: 100, y1: 2, y2: 2 }), draw("line", { x1: 0, x2: 100, y1: 98, y2: 98 }), draw("g")),
      make("div", { class: "caption" }, make("span", { "data-part": "since" }), make("span", {}, "KV usage, 0 to 100 %"), make("span", {}, "now"))));
};

const showHeld = (element, worker) => {
  const held = Object.entries(worker.held_blocks).map(([name, blocks]) => ({ name, text: `${name} ${number(blocks)}` }));
  if (worker.other_channels) held.push({ name: OTHERS, text: `${counted(worker.other_channels, "other channel")} ${number(worker.other_blocks)}` });
  held.push({ name: "", text: `free ${number(worker.free_blocks)} of ${number(worker.capacity_blocks)}` });
  keyed(element, held, (one) => one.name,
    (one) => make("span", {}, ...(one.name ? [make("span", { class: `swatch ${colourOf(one.name)}` })] : []), make("span", { "data-part": "text" })),
    (child, one) => say(part(child, "text"), one.text));
};

const updateWorker = (card, worker, history) => {
  const button = part(card, "button");
  const held = Object.entries(worker.held_blocks).map(([name, blocks]) => ({ name, blocks }));
  held.push({ name: OTHERS, blocks: worker.other_blocks });
  say(part(card, "state"), worker.state);
  set(part(card, "state"), "class", `state ${worker.state}`);
  say(part(card, "model"), worker.model);
  const drains = worker.state === "up" || worker.state === "gone";
  say(button, drains ? "Drain" : "Undrain");
  set(button, "aria-label", `${drains ? "Drain" : "Undrain"} ${worker.name}`);
  button.dataset.action = drains ? "drain" : "undrain";
  button.disabled = worker.state === "gone" || button.dataset.busy === "yes";
  const [bar, line] = card.querySelectorAll("svg");
  stack(bar, held, worker.capacity_blocks);
  set(bar, "aria-label", `${number(worker.capacity_blocks - worker.free_blocks)} of ${number(worker.capacity_blocks)} blocks held`);
  showHeld(part(card, "held"), worker);
  say(part(card, "engine"), worker.waiting ? `${number(worker.running)} + ${number(worker.waiting)}` : number(worker.running));
  say(part(card, "usage"), percent(worker.kv_usage));
  say(part(card, "drift"), number(worker.drift_blocks));
  say(part(card, "preemptions"), number(worker.preemptions));
  say(part(card, "step"), `${number(worker.step_ms, 1)} ms`);
  const span = usageLines(line, history.ages_s, history.usage[worker.name] ?? [], worker.kv_usage);
  set(line, "aria-label", `KV usage of ${worker.name} over the last ${age(span)}`);
  say(part(card, "since"), `${age(span)} ago`);
};

const showWorkers = (state) => {
  keyed(byId("worker-cards"), state.workers, (w) => w.name, createWorker, (card, worker) => updateWorker(card, worker, state.history));
  byId("no-workers").hidden = state.workers.length > 0;
  say(byId("no-workers"), state.fleet.running === null ? notTold("scheduler") : "No worker is known to the scheduler.");
  showMore("more-workers", state.workers_left_out, SEE_ALL, state.states_left_out);
  showDeparted(state);
};

const requestButton = (id) => {
  const button = make("button", { type: "button", class: "link id", "aria-label": `Timeline of ${id}` }, id);
  button.addEventListener("click", () => showTimeline(id));
  return button;
};

const createRecent = (asked) =>
  make("tr", {}, make("td", {}, requestButton(asked.request_id)),
    make("td", { "data-part": "status" }), make("td", { class: "number", "data-part": "took" }),
    make("td", {}, asked.model || "any"), make("td", {}, asked.channel || "default"), make("td", { class: "number", "data-part": "begun" }));

const showRecent = (recent, now) => {
  byId("no-recent").hidden = recent.length > 0;
  document.querySelector(".recent").hidden = recent.length === 0;
  keyed(byId("recent-rows"), recent, (asked) => asked.request_id, createRecent, (row, asked) => {
    say(part(row, "status"), asked.status || "open");
    set(part(row, "status"), "class", asked.status >= 400 ? "failed" : "");
    say(part(row, "took"), asked.status ? age(asked.seconds) : "–");
    say(part(row, "begun"), `${age(Math.max(0, now - asked.begun_unix_s))} ago`);
  });
};

const createDead = (letter) => {
  const button = make("button", { type: "button", "aria-label": `Requeue ${letter.request_id}` }, "Requeue");
  button.addEventListener("click", () =>
    act(button, "requeue", { request_id: letter.request_id }, () => `${letter.request_id} waits again, with fresh attempts.`, true));
  return make("li", {}, make("div", {}, requestButton(letter.request_id), make("span", { class: "quiet", "data-part": "facts" })),
    make("div", { class: "why" }, letter.last_error), button);
};

const showDead = (told, dead, now) => {
  const letters = told ?? [];
  byId("no-dead").hidden = letters.length > 0;
  say(byId("no-dead"), told === null ? notTold("queue") : "None.");
  keyed(byId("dead-cards"), letters, (letter) => `${letter.request_id} ${letter.died_unix_ns}`, createDead, (item, letter) => {
    const since = Math.max(0, now - letter.died_unix_ns / 1e9);
    say(part(item, "facts"), ` ${letter.channel}, ${counted(letter.attempts, "attempt")}, ${age(since)} ago`);
  });
  showMore("more-dead", letters.length ? (dead ?? 0) - letters.length : 0, "penstock dead list");
};

const createBatch = (batch) =>
  make("li", {}, make("div", {}, make("span", { class: "id" }, batch.id), " ", make("b", { "data-part": "status" }),
    make("span", { class: "quiet" }, ` ${batch.endpoint}`)),
  canvas("bar", "", draw("rect", { class: "done", x: 0, y: 0, height: 100 }), draw("rect", { class: "failures", y: 0, height: 100 })),
  make("div", { class: "quiet", "data-part": "counts" }), make("div", { class: "failed", "data-part": "error" }));

const showBatches = (told, now) => {
  const batches = told ?? [];
  byId("no-batches").hidden = batches.length > 0;
  say(byId("no-batches"), told === null ? notTold("queue") : "None.");
  keyed(byId("batch-rows"), batches, (batch) => batch.id, createBatch, (row, batch) => {
    const share = (count) => (batch.total ? (100 * count) / batch.total : 0).toFixed(2);
    const [done, failures] = row.querySelectorAll("rect");
    const begun = age(Math.max(0, now - batch.created_at));
    const counts = `${number(batch.completed)} of ${number(batch.total)} done, ${number(batch.failed)} failed`;
    say(part(row, "status"), batch.status);
    say(part(row, "error"), batch.error);
    part(row, "error").hidden = !batch.error;
    say(part(row, "counts"), `${counts}; begun ${begun} ago`);
    set(done, "width", share(batch.completed));
    set(failures, "x", share(batch.completed));
    set(failures, "width", share(batch.failed));
    set(row.querySelector("svg"), "aria-label", counts);
  });
};

// ---- actions ----

// What the gateway answers in the place of what was asked for; nothing that it answers at all is an AnswerError.
class AnswerError extends Error {}

const ask = async (path, options = {}) => {
  // With the origin: where the page's own address has a name and a password in it, fetch refuses a mere path.
  const response = await fetch(location.origin + path, { signal: AbortSignal.timeout(ANSWER_MS), ...options });
  // Browsers ask for the key when they open a page, for as long as it takes; nothing may disturb that from here.
  if (response.status === 401) await new Promise(() => location.reload());
  const body = await response.json().catch(() => null);
  if (!response.ok || body === null) throw new AnswerError(body?.error?.message ?? `the gateway answered ${response.status}`);
  return body;
};

const reasonOf = (error) => (error instanceof AnswerError ? error.message : "the gateway does not answer");

const announce = (text, failed = false) => {
  byId("said").className = failed ? "failed" : "";
  say(byId("said"), text);
};

// What was done `once` stays done: the second click of two would be told that nothing is left to do, as if both had failed.
const act = async (button, action, body, done, once = false) => {
  if (button.dataset.busy) return;
  button.dataset.busy = "yes";
  const request = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  try {
    announce(done(await ask(`/console/${action}`, request)));
    if (!once) delete button.dataset.busy;
  } catch (error) {
    delete button.dataset.busy;
    announce(`${action} failed: ${reasonOf(error)}`, true);
  }
  await poll();
};

const turnWorker = (worker, button) =>
  button.dataset.action === "drain"
    ? act(button, "drain", { worker }, (left) => `${worker} takes no new grants; ${counted(left.reservations, "request")} still there.`)
    : act(button, "undrain", { worker }, () => `${worker} takes grants again.`);

// ---- the timeline of one request ----

const PARTS = {
  wait: "for credits, in its channel", grant: "claim, lease and delivery", tokenize: "prompt rendered and counted",
  prefill: "until the first token", decode: "until the last token", record: "until the result was on disk",
};

const partRow = (one, total) => {
  const left = total ? (100 * one.from_ms) / total : 0;
  const width = total ? Math.max(0.4, (100 * (one.to_ms - one.from_ms)) / total) : 0;
  return make("li", { class: "row", title: PARTS[one.name] ?? "" },
    make("span", {}, one.name),
    canvas("part", "", draw("rect", { class: "c0", x: Math.min(left, 99.6).toFixed(2), y: 0, width: width.toFixed(2), height: 100 })),
    make("span", {}, milliseconds(one.to_ms - one.from_ms)));
};

// Steps of blocks over time; an ACK whose time is not known is drawn half way to the next.
const blockSteps = (acks, total) => {
  const most = Math.max(1, ...acks.map((ack) => ack.blocks));
  const times = acks.map((ack, place) => ack.at_ms ?? ((acks[place - 1]?.at_ms ?? 0) + (acks[place + 1]?.at_ms ?? total)) / 2);
  const x = (ms) => (total ? (100 * ms) / total : 0).toFixed(2);
  const y = (blocks) => (100 - (94 * blocks) / most).toFixed(2);
  let path = `M ${x(times[0] ?? 0)} 100`;
  acks.forEach((ack, place) => {
    path += ` L ${x(times[place])} ${y(ack.blocks)} L ${x(times[place + 1] ?? total)} ${y(ack.blocks)}`;
  });
  return make("div", { class: "row" }, make("span", {}, "blocks held"),
    canvas("blocks", `Blocks held over time, ${number(most)} at most`, draw("path", { d: path })),
    make("span", {}, `≤ ${number(most)}`));
};

const ackTable = (acks) =>
  make("div", { class: "scroll" }, make("table", {},
    make("caption", { class: "quiet" }, "Credits: blocks held after each message"),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "message"), make("th", { scope: "col", class: "number" }, "at"), make("th", { scope: "col", class: "number" }, "blocks held"))),
    make("tbody", {}, ...acks.map((ack) =>
      make("tr", {}, make("th", { scope: "row" }, ack.name),
        make("td", { class: "number" }, ack.at_ms === null ? "in between" : milliseconds(ack.at_ms)),
        make("td", { class: "number" }, number(ack.blocks)))))));

const summary = (found) => {
  const said = [`channel ${found.channel}`];
  if (found.worker) said.push(`worker ${found.worker}`);
  if (found.model) said.push(`model ${found.model}`);
  said.push(counted(found.attempts, "attempt"), counted(found.preemptions, "preemption"));
  if (found.prompt_tokens) {
    said.push(`${number(found.prompt_tokens)} prompt tokens (${number(found.cached_tokens)} cached), ${number(found.completion_tokens)} generated`);
  }
  return said.join(" · ");
};

const fillTimeline = (found) => {
  const children = [
    make("h3", {}, make("span", { class: "id" }, found.request_id), ` ${found.status}`),
    make("p", { class: "quiet" }, summary(found)),
  ];
  if (found.error) children.push(make("p", { class: "failed" }, found.error));
  if (found.parts.length) {
    children.push(make("h4", {}, `${milliseconds(found.total_ms)} in all`),
      make("ul", { "aria-label": "Parts" }, ...found.parts.map((one) => partRow(one, found.total_ms))));
  } else {
    children.push(make("p", {}, "It has not ended; its timeline is known when it has."));
  }
  if (found.acks.length) children.push(blockSteps(found.acks, found.total_ms), ackTable(found.acks));
  byId("timeline").replaceChildren(...children);
};

let lookups = 0;

const showTimeline = async (id) => {
  const panel = byId("timeline");
  byId("request-id").value = id;
  const lookup = ++lookups;
  const found = await ask(`/console/requests/${encodeURIComponent(id)}`).catch((error) => ({ failure: reasonOf(error) }));
  // A later lookup is under way or has been answered: its answer is the one to show.
  if (lookup !== lookups) return;
  if (found.failure) panel.replaceChildren(make("p", { class: "failed" }, `No timeline of ${id}: ${found.failure}`));
  else fillTimeline(found);
  panel.hidden = false;
  panel.focus();
};

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  showTimeline(byId("request-id").value.trim());
});

// ---- polling ----

const connection = (text, kind) => {
  say(byId("connection"), text);
  byId("connection").className = kind || "quiet";
};

const show = (state) => {
  showTotals(state.fleet);
  showProblems(state);
  showChannels(state);
  showTenants(state.tenants);
  showWorkers(state);
  // The fleet's clock: that of the machine with the browser may be another.
  showRecent(state.recent, state.now_unix_s);
  showBatches(state.batches, state.now_unix_s);
  showDead(state.dead, state.fleet.dead, state.now_unix_s);
};

let timer = 0;
let asking = false;

const poll = async () => {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  let pause = POLL_MS;
  try {
    show(await ask("/console/state"));
    connection("live", "live");
  } catch (error) {
    connection(`${reasonOf(error)}; what is shown is old`, "lost");
    pause = AWAY_MS;
  }
  asking = false;
  // Nobody looks at a hidden page.
  if (!document.hidden) timer = setTimeout(poll, pause);
};

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
poll();
