// The details of the selected block: requested by its number, shown as a list of terms.
import { NAMES, STATES } from "./cells.js";
import { request } from "./watch.js";
import { many, span, whole } from "./words.js";

const MAX_SHOWN = 6;
const MAX_NAMES = 3;

export class BlockCard {
  #loading = null;
  #model = () => null;

  /** `show` gets the chain to highlight; `open` the block that the user selects next. */
  constructor(at, model, show, open) {
    this.at = at;
    this.#model = model;
    this.show = show;
    this.open = open;
    at("block-close").addEventListener("click", () => this.close());
  }

  async choose(block) {
    this.#loading?.abort();
    const { signal } = this.#loading = new AbortController();
    this.at("block-card").hidden = false;
    this.at("block-title").textContent = `Block ${whole(block)}`;
    this.#write("Loading …");
    try {
      const query = this.#model() ? `?model=${encodeURIComponent(this.#model())}` : "";
      const facts = await (await request(`/v1/admin/blocks/${block}${query}`, signal)).json();
      this.#list(facts);
    } catch (error) {
      if (signal.aborted) return;
      this.#write(error.message);
      this.show([]);
    }
  }

  close() {
    this.#loading?.abort();
    this.at("block-card").hidden = true;
    this.show([]);
  }

  #write(words) {
    this.at("block-state").textContent = words;
    this.at("block-terms").replaceChildren();
  }

  #list(facts) {
    const holds = `${many(facts.ref_count, "reference")}${facts.pin_count ? `, ${many(facts.pin_count, "pin")}` : ""}`;
    this.at("block-state").textContent = `${NAMES[STATES.indexOf(facts.state)] ?? facts.state}, ${holds}`;
    const terms = [
      ["Chain", facts.chain.length ? `${many(facts.chain.length, "block")} from the root` : "none: it is not named",
        this.#blocks(facts.chain, "→")],
      ["Children", facts.children.length ? whole(facts.children.length) : "none", this.#blocks(facts.children, "·")],
      ["Cache group", facts.cache_group ?? "–"],
      ["Tenant", facts.tenant ?? "–"],
      ["Age", span(facts.age_s)],
      ["Tokens", whole(facts.num_tokens)],
      ["Digest", facts.digest ? `${facts.digest.slice(0, 16)}…` : "none yet"],
      ["Held by", facts.requests.length ? this.#requests(facts.requests) : "no request"],
    ];
    this.at("block-terms").replaceChildren(...terms.map(row));
    this.show(facts.chain);
  }

  #requests(names) {
    const more = names.length - MAX_NAMES;
    return `${names.slice(0, MAX_NAMES).join(", ")}${more > 0 ? ` and ${whole(more)} more` : ""}`;
  }

  /** Buttons for the first and the last few of these blocks. */
  #blocks(numbers, separator) {
    if (!numbers.length) return null;
    const half = MAX_SHOWN / 2, list = document.createElement("span");
    const shown = numbers.length <= MAX_SHOWN ? numbers : [...numbers.slice(0, half), null, ...numbers.slice(-half)];
    list.className = "blocks";
    shown.forEach((number, at) => {
      if (at) list.append(` ${separator} `);
      if (number === null) return list.append("…");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "link";
      button.textContent = String(number);
      button.setAttribute("aria-label", `Show block ${number}`);
      button.addEventListener("click", () => this.open(number));
      return list.append(button);
    });
    return list;
  }
}

function row([term, words, more]) {
  const pair = document.createElement("div"), name = document.createElement("dt"), value = document.createElement("dd");
  name.textContent = term;
  value.append(words, ...(more ? [": ", more] : []));
  pair.append(name, value);
  return pair;
}
