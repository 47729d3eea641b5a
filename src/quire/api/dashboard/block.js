// What is known of the block that was chosen: asked for by its number, told as a list of terms.
import { NAMES, STATES } from "./cells.js";
import { ask } from "./watch.js";
import { many, span, whole } from "./words.js";

const MOST_SHOWN = 6;
const MOST_NAMES = 3;

export class BlockCard {
  #asking = null;
  #model = () => null;

  /** `show` gets the chain to highlight; `open` a block that somebody wants to see next. */
  constructor(at, model, show, open) {
    this.at = at;
    this.#model = model;
    this.show = show;
    this.open = open;
    at("block-close").addEventListener("click", () => this.close());
  }

  async choose(block) {
    this.#asking?.abort();
    const { signal } = this.#asking = new AbortController();
    this.at("block-card").hidden = false;
    this.at("block-title").textContent = `Block ${whole(block)}`;
    this.#say("Asking …");
    try {
      const query = this.#model() ? `?model=${encodeURIComponent(this.#model())}` : "";
      const told = await (await ask(`/v1/admin/blocks/${block}${query}`, signal)).json();
      this.#tell(told);
    } catch (error) {
      if (signal.aborted) return;
      this.#say(error.message);
      this.show([]);
    }
  }

  close() {
    this.#asking?.abort();
    this.at("block-card").hidden = true;
    this.show([]);
  }

  #say(words) {
    this.at("block-state").textContent = words;
    this.at("block-terms").replaceChildren();
  }

  #tell(told) {
    const holds = `${many(told.ref_count, "reference")}${told.pin_count ? `, ${many(told.pin_count, "pin")}` : ""}`;
    this.at("block-state").textContent = `${NAMES[STATES.indexOf(told.state)] ?? told.state}, ${holds}`;
    const terms = [
      ["Chain", told.chain.length ? `${many(told.chain.length, "block")} from the root` : "none: it is not named",
        this.#blocks(told.chain, "→")],
      ["Children", told.children.length ? whole(told.children.length) : "none", this.#blocks(told.children, "·")],
      ["Cache group", told.cache_group ?? "–"],
      ["Tenant", told.tenant ?? "–"],
      ["Age", span(told.age_s)],
      ["Tokens", whole(told.num_tokens)],
      ["Digest", told.digest ? `${told.digest.slice(0, 16)}…` : "none yet"],
      ["Held by", told.requests.length ? this.#requests(told.requests) : "no request"],
    ];
    this.at("block-terms").replaceChildren(...terms.map(row));
    this.show(told.chain);
  }

  #requests(names) {
    const more = names.length - MOST_NAMES;
    return `${names.slice(0, MOST_NAMES).join(", ")}${more > 0 ? ` and ${whole(more)} more` : ""}`;
  }

  /** Numbers to go to: the first and the last few. */
  #blocks(numbers, between) {
    if (!numbers.length) return null;
    const half = MOST_SHOWN / 2, list = document.createElement("span");
    const shown = numbers.length <= MOST_SHOWN ? numbers : [...numbers.slice(0, half), null, ...numbers.slice(-half)];
    list.className = "blocks";
    shown.forEach((number, at) => {
      if (at) list.append(` ${between} `);
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
  const pair = document.createElement("div"), name = document.createElement("dt"), told = document.createElement("dd");
  name.textContent = term;
  told.append(words, ...(more ? [": ", more] : []));
  pair.append(name, told);
  return pair;
}
