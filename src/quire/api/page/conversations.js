// Conversations, stored only in this browser. A message is {role, content, reasoning?, calls?, figures?, error?}. If
// the browser's storage is full, the conversation is not stored, and a notice is shown.

const STORED = "quire.conversations";
const DEFAULTS = "quire.settings";

const read = (name, fallback) => {
  try { return JSON.parse(localStorage.getItem(name)) ?? fallback; } catch { return fallback; }
};

export class Conversations {
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.all = read(STORED, []).filter((conversation) => Array.isArray(conversation?.messages));
    this.current = this.all[0] ?? this.begin();
  }

  begin() {
    const settings = this.current?.settings ?? read(DEFAULTS, {});
    this.current = { id: crypto.randomUUID(), title: "", settings: { ...settings }, messages: [] };
    return this.current;
  }

  choose(id) {
    this.current = this.all.find((conversation) => conversation.id === id) ?? this.current;
  }

  remove(id) {
    this.all = this.all.filter((conversation) => conversation.id !== id);
    if (this.current.id === id) this.current = this.all[0] ?? this.begin();
    this.keep();
  }

  removeAll() {
    this.all = [];
    this.begin();
    this.keep();
  }

  /** Store all conversations, the current one first. */
  keep() {
    const current = this.current;
    if (current.messages.length) {
      current.title ||= current.messages[0].content.trim().slice(0, 60) || "Untitled";
      this.all = [current, ...this.all.filter((conversation) => conversation !== current)];
    }
    try {
      localStorage.setItem(STORED, JSON.stringify(this.all));
      localStorage.setItem(DEFAULTS, JSON.stringify(current.settings));
    } catch {
      this.onProblem("The conversation storage of this browser is full: delete conversations to keep this one.");
    }
  }
}
