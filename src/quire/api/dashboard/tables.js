// Tables and lists. Nodes are reused, and only text that has changed is written; nothing is ever written as markup.
import { ago, many, percent, short, span, whole } from "./words.js";

const CLASSES = ["HIGH", "NORMAL", "LOW"];
const REASONS = {
  first_seen: "nothing like it has been here lately",
  diverged: "another prompt begins alike and then differs",
  evicted: "it was there and had to make room",
  too_short: "all whole blocks were found",
  computing: "another request was computing it",
  state_missing: "its recurrent state was not kept",
  other_namespace: "cached for another model or format",
};

const write = (node, words) => { if (node.textContent !== words) node.textContent = words; };

/** Give `parent` one child per row, created by `make` and filled by `fill`. */
function fit(parent, rows, make, fill) {
  while (parent.children.length > rows.length) parent.lastElementChild.remove();
  rows.forEach((row, at) => fill(parent.children[at] ?? parent.appendChild(make()), row));
}

const element = (name, className = "") => Object.assign(document.createElement(name), { className });

/** Fill a table body with rows of `count` cells; the first cell of each is the row's header. */
function table(body, rows, count, classes = []) {
  const make = () => {
    const made = element("tr");
    for (let at = 0; at < count; at += 1) made.append(element(at ? "td" : "th", classes[at] ?? ""));
    made.firstElementChild.scope = "row";
    return made;
  };
  fit(body, rows, make, (made, cells) => cells.forEach((cell, at) => write(made.children[at], cell)));
}

/** Set the length of a bar, as a fraction of the longest. */
function setLength(bar, part) {
  const width = `${(100 * part).toFixed(1)}%`;
  if (bar.style.width !== width) bar.style.width = width;
}

export class Tables {
  constructor(at) {
    this.at = at;
  }

  update({ at_s, running, queue, misses, warnings, workers, fleet }) {
    this.#queue(queue);
    this.#misses(misses);
    this.#running(running);
    this.#warnings(warnings);
    this.#workers(workers, at_s);
    this.#fleet(fleet);
  }

  #queue(queue) {
    const tenants = new Map();
    for (const { class: priority, tenant, num_requests } of queue) {
      const row = tenants.get(tenant) ?? tenants.set(tenant, { sum: 0 }).get(tenant);
      const column = String(priority).toUpperCase();
      row[column] = (row[column] ?? 0) + num_requests;
      row.sum += num_requests;
    }
    const rows = [...tenants].sort(([, a], [, b]) => b.sum - a.sum);
    const cells = rows.map(([tenant, row]) =>
      [tenant, ...CLASSES.map((name) => (row[name] ? whole(row[name]) : "–")), whole(row.sum)]);
    table(this.at("queue-rows"), cells, 5, ["", "figure", "figure", "figure", "figure"]);
    this.#empty("queue", !rows.length, "No request is waiting.");
  }

  #misses(misses) {
    const rows = misses.filter(({ num_tokens, num_requests }) => num_tokens || num_requests)
      .sort((a, b) => b.num_tokens - a.num_tokens);
    const highest = rows[0]?.num_tokens || 1, sum = rows.reduce((all, { num_tokens }) => all + num_tokens, 0) || 1;
    const make = () => {
      const made = element("li"), track = element("span", "track");
      track.append(element("span", "bar"));
      made.append(element("span", "name"), element("span", "figure"), track, element("span", "note"));
      return made;
    };
    fit(this.at("miss-rows"), rows, make, (made, { reason, num_tokens, num_requests }) => {
      const [name, figure, track, note] = made.children;
      write(name, reason.replaceAll("_", " "));
      write(figure, `${short(num_tokens)} tokens · ${percent(num_tokens / sum)}`);
      write(note, `${many(num_requests, "request")}: ${REASONS[reason] ?? "see the guide"}`);
      setLength(track.firstElementChild, num_tokens / highest);
    });
    this.#empty("miss", !rows.length, "Nothing has missed in the last hour.");
  }

  #running(running) {
    const cells = running.map((row) => [
      row.request_id, row.tenant, row.class, row.phase, `${whole(row.computed)} / ${whole(row.known)}`,
      `${whole(row.cached_tokens)} of ${whole(row.prompt_tokens)}`, whole(row.output_tokens),
    ]);
    table(this.at("running-rows"), cells, 7, ["code", "", "", "", "figure", "figure", "figure"]);
    this.#empty("running", !running.length, "No request runs.");
    this.at("running-scroll").hidden = !running.length;
  }

  #warnings(warnings) {
    const make = () => {
      const made = element("li");
      made.append(element("strong"), element("code"), element("span", "note"));
      return made;
    };
    fit(this.at("warning-rows"), warnings, make, (made, { tenant, kind, line, num_lost_tokens, num_requests }) => {
      const [title, code, note] = made.children;
      write(title, `▲ ${tenant}: ${String(kind).replaceAll("_", " ")}`);
      write(code, line);
      write(note, `cost ${many(num_lost_tokens, "token")} in ${many(num_requests, "request")}`);
    });
    this.#empty("warning", !warnings.length, "No unstable prefix has been seen.");
  }

  #workers(workers, now_s) {
    const rows = [...workers].reverse().map(({ number, state, started_s, ended_s, why }) => [
      `Worker ${number}`, state, span((ended_s ?? now_s) - started_s),
      ended_s == null ? "running" : `ended ${ago(now_s - ended_s)}${why ? `: ${why}` : ""}`,
    ]);
    table(this.at("worker-rows"), rows, 4, ["", "", "figure", ""]);
    this.#empty("worker", !rows.length, "No worker has been started.");
  }

  #fleet(fleet) {
    this.at("fleet").hidden = !fleet;
    if (!fleet) return;
    const rows = fleet.members.map((member) => [
      member.address, member.state, whole(member.num_requests), whole(member.num_tokens_in_flight),
      whole(member.num_blocks), percent(member.kv_usage), member.exactness || "–",
    ]);
    table(this.at("fleet-rows"), rows, 7, ["code", "", "figure", "figure", "figure", "figure", "code"]);
    const moved = `${many(fleet.num_moved, "request")} moved, ${whole(fleet.num_moved_inexact)} of them to other bits`;
    const held = `${whole(fleet.num_held)} held by no member, ${whole(fleet.num_quarantined)} quarantined`;
    write(this.at("fleet-summary"), `${moved}; ${held}; hit rate ${percent(fleet.hit_rate)}.`);
  }

  #empty(name, isEmpty, words) {
    const note = this.at(`${name}-empty`);
    note.hidden = !isEmpty;
    if (isEmpty) write(note, words);
  }
}
