// The chats that this browser stores, newest first. They never leave it.

const MOST_TALKS = 50, TITLE = 80;
let talkId = newId();

// crypto.randomUUID exists in secure contexts only, and a server in the home has none.
function newId() { return `${Date.now()}-${Math.random()}`; }

const keptTalks = () => stored(localStorage, "talks") ?? [];

// Stores the open chat: for a reload with its images and sounds, in the list without them, because browsers grant a page 5 MB.
function keep() {
  store(sessionStorage, "talk", talk.map(({ view, open, ...message }) => message));
  store(sessionStorage, "talk-id", talkId);
  if (!talk.length || !$("keeps").checked) return;
  const messages = talk.map(({ view, open, media, ...message }) => ({ ...message, media: media?.map(({ name }) => ({ name, bytes: 0 })) }));
  const all = [{ id: talkId, title: talk[0].content.slice(0, TITLE), messages }, ...keptTalks().filter(({ id }) => id !== talkId)].slice(0, MOST_TALKS);
  while (all.length && !store(localStorage, "talks", all)) all.pop();
  listTalks();
}

function listTalks() {
  const all = keptTalks();
  $("kept").replaceChildren();
  for (const one of all) {
    const line = element($("kept"), "li");
    button(line, one.title, () => { begin(one.id, one.messages); unfold("talks", false); });
    icon(line, "Remove", () => remove(({ id }) => id === one.id));
  }
  $("none-kept").hidden = all.length > 0;
  $("remove-all").hidden = !all.length;
}

// Removes stored chats. An open chat stays open, and is stored again with its next answer.
function remove(which) {
  store(localStorage, "talks", keptTalks().filter((one) => !which(one)));
  listTalks();
}

// Replaces the open chat with another one.
function begin(id, messages) {
  if (running) keep();
  running?.controller.abort();
  running = null;
  talkId = id;
  talk = messages;
  attached = [];
  showAttached();
  endEdit();
  busy(false);
  store(sessionStorage, "talk", talk);
  store(sessionStorage, "talk-id", talkId);
  redraw();
  $("talk").scrollTop = $("talk").scrollHeight;
  $("status").textContent = "";
}
