// The chat: messages, their views, settings, and what is kept over a reload.

const $ = (id) => document.getElementById(id);
const PAINT_MS = 60, STORED_SETTINGS = ["system", "temperature", "drafts", "theme", "marks", "keeps"];
const ICONS = {
  Copy: "M9 9h11v11H9zM5 15H4V4h11v1", Edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4", Regenerate: "M20 11a8 8 0 1 0-2.3 6M20 4v7h-7",
  Remove: "M6 6l12 12M18 6L6 18", Copied: "M5 12l5 5 9-10",
};
let talk = [];  // {role, content, media, thoughts, calls, figures, drafted, error}
let running = null, editing = null;
let model = null;  // `meta` of /v1/models
const TRY = ["Explain speculative decoding in three sentences.", "Write a Python function that merges two sorted lists.", "Translate into German: The train leaves at noon."];
// Suggestions for the two example models, which have a description: one answers questions, the other continues code.
const ASK = ["What is a stack?", "How do I read a file?", "What is a drafter?"];
const CONTINUE = ["def fibonacci(n):", "class Stack:", "import unittest"];
const CONTINUED = 200;  // tokens; without a limit, it would continue until the context is full
let attached = [];  // {name, bytes, part}: files of the next message, each with its part of the request
// The most bytes of all media in a request. Base64 makes them a third larger, and a request has at most 16 MiB.
const MEDIA_BYTES = 12e6;
const SOUNDS = { "audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/flac": "flac", "audio/x-flac": "flac" };
const IMAGES = ["image/jpeg", "image/png", "image/webp"];

const stored = (where, name) => { try { return JSON.parse(where.getItem(`edge-mtp.${name}`)); } catch { return null; } };
// Returns whether the value was stored: the storage may be full or disabled.
const store = (where, name, value) => { try { where.setItem(`edge-mtp.${name}`, JSON.stringify(value)); return true; } catch { return false; } };
const headers = () => ({ "Content-Type": "application/json", ...($("key").value && { Authorization: `Bearer ${$("key").value}` }) });

function figures(usage) {
  const parts = [`${usage.completion_tokens} tokens`, `${usage.tokens_per_second.toFixed(1)} tok/s`];
  if (usage.drafted_tokens) parts.push(`${usage.accepted_tokens} of ${usage.drafted_tokens} drafts accepted`);
  const energy = usage.energy;
  if (energy?.joules_per_token) parts.push(`${energy.estimate ? "ESTIMATE " : ""}${energy.joules_per_token.toPrecision(3)} J/token (${energy.scope})`);
  else if (energy?.joules) parts.push(`${energy.estimate ? "ESTIMATE " : ""}${energy.joules.toPrecision(3)} J together with other requests (${energy.scope})`);
  else if (energy) parts.push(`energy not measured: ${energy.reason}`);
  return parts.join(" · ");
}

async function failure(response) {
  if (response.status === 401) $("key").hidden = false;
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server returned status ${response.status}`;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function button(parent, text, act) {
  const made = element(parent, "button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", act);
  return made;
}

// A button with a drawing. Screen readers read its name, and the pointer shows it.
function icon(parent, name, act) {
  const made = button(parent, "", act);
  made.className = "icon";
  made.title = name;
  made.setAttribute("aria-label", name);
  const drawing = made.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
  drawing.setAttribute("viewBox", "0 0 24 24");
  drawing.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path")).setAttribute("d", ICONS[name]);
}

// Shows a message; scrolls along unless the user has scrolled up.
function show(message) {
  const following = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 60;
  const article = message.view ??= element($("talk"), "article", message.role);
  article.replaceChildren();
  if (message.thoughts) {
    const thoughts = element(article, "details");
    thoughts.open = message.open ?? false;
    thoughts.addEventListener("toggle", () => { message.open = thoughts.open; });
    element(thoughts, "summary").textContent = "Thoughts";
    element(thoughts, "p", "thoughts").textContent = message.thoughts;
  }
  const text = element(article, "div", "text");
  if (message.role === "user") text.textContent = message.content;
  else written(text, message.content, $("marks").checked ? message.drafted : []);
  if (message.media?.length) element(article, "p", "media").textContent = message.media.map(({ name }) => `[${name}]`).join(" ");
  if (message.calls) element(article, "p", "calls").textContent = message.calls;
  if (message.error) {
    const error = element(article, "p", "error");
    error.textContent = message.error;
  }
  foot(article, message);
  if (following) $("talk").scrollTop = $("talk").scrollHeight;
}

// Shows the text of a model that continues code as code, because Markdown would lose its indentation.
function written(parent, content, drafted) {
  if (model?.description && !model.answers && !content.includes("```")) plain(element(parent, "pre", "code"), content, 0, drafted);
  else markdown(parent, content, drafted);
}

// The figures of an answer, and the buttons of a message.
function foot(article, message) {
  const row = element(article, "div", "foot");
  if (message.figures) element(row, "p", "figures").textContent = message.figures;
  if (message === running?.message) return;
  if (message.role === "user") icon(row, "Edit", () => edit(message));
  else {
    if (message.content) icon(row, "Copy", (event) => copy(message.content, event.currentTarget));
    if (message === talk.at(-1)) icon(row, "Regenerate", regenerate);
  }
}

// The first screen: what the model is, and suggestions to try.
function introduce() {
  const article = element($("talk"), "article", "introduction");
  if (model.description) element(article, "p").textContent = `This model is ${model.description}.`;
  element(article, "p", "facts").textContent = facts();
  element(article, "p").textContent = "Try:";
  for (const text of !model.description ? TRY : model.answers ? ASK : CONTINUE) {
    button(element(article, "p"), text, () => { $("text").value = text; send(); });
  }
}

function facts() {
  const millions = model.n_params / 1e6;
  return [
    millions < 1000 ? `${Math.round(millions)} million parameters` : `${(millions / 1000).toFixed(1)} billion parameters`,
    `context of ${model.n_ctx.toLocaleString("en")} tokens`,
    model.drafter === "none" ? "no drafter" : `drafter ${model.drafter}`,
    model.rows.exact ? "drafts cannot change a text with a seed or at temperature 0" : "drafts may change the text",
  ].join(" · ");
}

function redraw() {
  $("talk").replaceChildren();
  if (!talk.length && model) introduce();
  for (const message of talk) {
    message.view = null;
    show(message);
  }
}

async function ask() {
  const mine = talk, message = { role: "assistant", content: "", thoughts: "", calls: "", figures: "", drafted: [], error: "" };
  // A message that got no answer is not sent again.
  const sent = talk.filter(({ content }, i) => content && talk[i + 1]?.content !== "").map(({ role, content, media }) => ({
    role, content: media?.some(({ part }) => part) ? [...media.flatMap(({ part }) => part ?? []), { type: "text", text: content }] : content,
  }));
  if ($("system").value.trim()) sent.unshift({ role: "system", content: $("system").value.trim() });
  talk.push(message);
  running = { controller: new AbortController(), message };
  busy(true);
  redraw();
  $("status").textContent = "The model is answering.";
  let painted = 0, timer = null;
  const paint = () => {
    timer = null;
    painted = performance.now();
    if (mine === talk) show(message);
  };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal: running.controller.signal,
      body: JSON.stringify({
        messages: sent, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true, draft_spans: true },
        ...(model?.description && !model.answers && { max_tokens: CONTINUED }),
        ...($("temperature").value !== "" && { temperature: Number($("temperature").value) }),
        ...($("drafts").value !== "" && { draft_length: Number($("drafts").value) }),
      }),
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      take(message, event);
      timer ??= setTimeout(paint, Math.max(0, PAINT_MS - (performance.now() - painted)));
    }
  } catch (error) {
    if (error.name === "AbortError") message.figures += " · stopped";
    else message.error = error.message;
  }
  clearTimeout(timer);
  if (mine !== talk) return;  // "New" has begun another talk
  running = null;
  busy(false);
  keep();
  redraw();
  // Only once, when the answer is complete: a screen reader would start again with every piece.
  $("status").textContent = message.error || `Answer: ${message.view.querySelector(".text").textContent}`;
}

function take(message, event) {
  const choice = event.choices[0], delta = choice?.delta ?? {};
  if (delta.content) {
    const flags = new Array(delta.content.length).fill(0), starts = [];
    let units = 0;
    for (const character of delta.content) { starts.push(units); units += character.length; }
    starts.push(units);
    for (const [from, to] of choice.draft_spans ?? []) flags.fill(1, starts[from], starts[to]);
    message.content += delta.content;
    message.drafted.push(...flags);
  }
  message.thoughts += delta.reasoning_content ?? "";
  for (const call of delta.tool_calls ?? []) message.calls += `[call: ${call.function.name}(${call.function.arguments})] `;
  if (event.usage) message.figures = figures(event.usage);
  if (choice?.finish_reason === "length") message.error = "cut off: the context is full; start a new chat, or the server with a larger --context";
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (!is) $("text").focus();
}

function send() {
  const text = $("text").value.trim();
  if (!text || running) return;
  if (editing) talk.splice(talk.indexOf(editing));
  endEdit();
  talk.push({ role: "user", content: text, media: attached });
  attached = [];
  refuse("");
  showAttached();
  ask();
  $("talk").scrollTop = $("talk").scrollHeight;
}

// Images and sound become parts of the request: data: URLs and base64.
async function attach(files) {
  refuse("");
  for (const file of files) {
    if (!IMAGES.includes(file.type) && !SOUNDS[file.type]) {
      refuse(`${file.name} is neither an image (jpeg, png, webp) nor a sound (wav, mp3, flac); choose another file.`);
      continue;
    }
    const used = [...talk.flatMap(({ media }) => media ?? []), ...attached].reduce((sum, { bytes }) => sum + bytes, 0);
    if (used + file.size > MEDIA_BYTES) {
      refuse(`With ${file.name} the chat has more than ${MEDIA_BYTES / 1e6} MB of images and sound; choose a smaller file, or start a new chat.`);
      continue;
    }
    const url = await new Promise((done) => {
      const reader = new FileReader();
      reader.addEventListener("load", () => done(reader.result));
      reader.readAsDataURL(file);
    });
    const part = SOUNDS[file.type]
      ? { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: SOUNDS[file.type] } }
      : { type: "image_url", image_url: { url } };
    attached.push({ name: file.name, bytes: file.size, part });
  }
  showAttached();
}

// Shows why a file is refused, also to screen readers.
function refuse(sentence) {
  $("refused").textContent = $("status").textContent = sentence;
  $("refused").hidden = !sentence;
}

function showAttached() {
  $("attached").replaceChildren();
  $("attached").hidden = !attached.length;
  for (const one of attached) {
    button($("attached"), `${one.name} ×`, () => { attached = attached.filter((other) => other !== one); showAttached(); });
  }
}

function regenerate() {
  if (running) return;
  talk.pop();
  ask();
}

function edit(message) {
  if (running) return;
  editing = message;
  $("text").value = message.content;
  attached = [...(message.media ?? [])];
  showAttached();
  $("editing").hidden = false;
  grow();
  $("text").focus();
}

function endEdit() {
  editing = null;
  $("editing").hidden = true;
  $("text").value = "";
  grow();
}

function files(event) {
  const found = [...(event.clipboardData ?? event.dataTransfer).files];
  if (found.length) {
    event.preventDefault();
    attach(found);
  }
}

async function copy(text, where) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // the clipboard API exists in secure contexts only
    const area = element(document.body, "textarea", "unseen");
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const path = where.querySelector("path"), before = path?.getAttribute("d") ?? where.textContent;
  const mark = (as) => { if (path) path.setAttribute("d", as); else where.textContent = as; };
  mark(path ? ICONS.Copied : "Copied");
  $("status").textContent = "Copied.";
  setTimeout(() => mark(before), 1500);
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`;
}

async function name() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.ok) {
    const card = (await response.json()).data[0];
    $("model").textContent = card.id;
    model = card.meta;
    $("facts").textContent = facts();
    $("attach").hidden = model.input_modalities.length === 1;
    if (!talk.length) redraw();
    store(sessionStorage, "key", $("key").value);
  } else if (response.status === 401) $("key").hidden = false;
}

function start() {
  const kept = stored(localStorage, "settings") ?? {};
  const value = (id) => $(id).type === "checkbox" ? "checked" : "value";
  for (const id of STORED_SETTINGS) {
    $(id)[value(id)] = kept[id] ?? ($(id).type === "checkbox" ? true : "");
    $(id).addEventListener("change", () => {
      store(localStorage, "settings", Object.fromEntries(STORED_SETTINGS.map((one) => [one, $(one)[value(one)]])));
      if (id === "marks") talk.forEach(show);
      dress();
    });
  }
  dress();
  $("key").value = stored(sessionStorage, "key") ?? "";
  $("key").hidden = !$("key").value;
  talk = stored(sessionStorage, "talk") ?? [];
  talkId = stored(sessionStorage, "talk-id") ?? talkId;
  listTalks();
  redraw();
  $("talk").scrollTop = $("talk").scrollHeight;
  name();
}

// Applies the chosen colours, or those of the system.
function dress() { document.documentElement.style.colorScheme = $("theme").value || "light dark"; }

function unfold(id, open) {
  $(id).hidden = !open;
  $(`${id}-button`).setAttribute("aria-expanded", String(open));
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  if (event.key === "Escape" && editing) endEdit();
});
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => { attach([...$("files").files]); $("files").value = ""; });
$("text").addEventListener("paste", files);
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", files);
$("keep").addEventListener("click", () => { endEdit(); attached = []; showAttached(); $("text").focus(); });
$("stop").addEventListener("click", () => running?.controller.abort());
$("new").addEventListener("click", () => begin(newId(), []));
for (const id of ["settings", "talks"]) $(`${id}-button`).addEventListener("click", () => unfold(id, $(id).hidden));
$("remove-all").addEventListener("click", () => remove(() => true));
$("talk").addEventListener("click", (event) => {
  if (event.target.matches("button.copy")) copy(event.target.closest("figure").querySelector("code").textContent, event.target);
});
$("key").addEventListener("change", name);
start();
