// Conversations, kept in this browser and nowhere else. A message is {role, content, reasoning?, calls?, figures?,
// error?}. What the browser has no room for is not kept, and a notice is shown.

const KEPT = "quire.conversations";
const DEFAULTS = "quire.settings";

const read = (name, otherwise) => {
  try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; }
};

export class Conversations {
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.all = read(KEPT, []).filter((one) => Array.isArray(one?.messages));
    this.current = this.all[0] ?? this.begin();
  }

  begin() {
    const settings = this.current?.settings ?? read(DEFAULTS, {});
    this.current = { id: crypto.randomUUID(), title: "", settings: { ...settings }, messages: [] };
    return this.current;
  }

  choose(id) {
    this.current = this.all.find((one) => one.id === id) ?? this.current;
  }

  remove(id) {
    this.all = this.all.filter((one) => one.id !== id);
    if (this.current.id === id) this.current = this.all[0] ?? this.begin();
    this.keep();
  }

  removeAll() {
    this.all = [];
    this.begin();
    this.keep();
  }

  /** Write down what is there, the current one first. */
  keep() {
    const current = this.current;
    if (current.messages.length) {
      current.title ||= current.messages[0].content.trim().slice(0, 60) || "Untitled";
      this.all = [current, ...this.all.filter((one) => one !== current)];
    }
    try {
      localStorage.setItem(KEPT, JSON.stringify(this.all));
      localStorage.setItem(DEFAULTS, JSON.stringify(current.settings));
    } catch {
      this.onProblem("The conversation storage of this browser is full: delete conversations to keep this one.");
    }
  }
}
