// One answer as it grows: its tokens on the page, each marked by who wrote it, and the counts behind the figures.

import { element } from "./element.js";
import { later } from "./frame.js";
import { round, whole } from "./words.js";

export const MARKS = 8; // positions that parts.css has a mark for
const RECENT_MS = 1500; // the pace shown is that of the last moment
const SHOWN_ROUNDS = 48;

/** Tokens, rounds and time, told by the tokens alone until the server gives its own counts. */
export class Tally {
  constructor() {
    this.tokens = this.rounds = 0;
    this.kept = []; // accepted drafts by position, the first at index 0
    this.recent = [[]]; // the last rounds, each the positions of its tokens
    this.marks = []; // [when, tokens so far] of the last moment
    this.end = null;
  }

  add(tokens) {
    for (const { position } of tokens) {
      this.tokens += 1;
      this.recent.at(-1).push(position ?? 0);
      if (position) this.kept[position - 1] = (this.kept[position - 1] ?? 0) + 1;
      else this.closeRound(); // a round ends with the target's own token
    }
    const now = performance.now();
    this.started ??= now;
    this.latest = now;
    this.marks.push([now, this.tokens]);
    while (this.marks.length > 2 && now - this.marks[0][0] > RECENT_MS) this.marks.shift();
  }

  closeRound() {
    this.rounds += 1;
    this.recent.push([]);
    if (this.recent.length > SHOWN_ROUNDS + 1) this.recent.shift();
  }

  /** The server's counts replace those made here. */
  finish(end) {
    this.end = end;
    this.tokens = end.usage?.completion_tokens ?? this.tokens;
    this.rounds = end.speculative?.rounds ?? this.rounds;
    this.kept = end.speculative?.accepted_by_position ?? this.kept;
  }

  get seconds() {
    const told = this.end?.timings?.predicted_ms;
    return told ? told / 1000 : (this.latest - this.started) / 1000 || 0;
  }

  get perSecond() {
    const told = this.end?.timings?.predicted_per_second;
    if (told) return told;
    const [first, last] = [this.marks[0], this.marks.at(-1)];
    return first && last[0] > first[0] ? ((last[1] - first[1]) * 1000) / (last[0] - first[0]) : 0;
  }

  get perRound() {
    const accepted = this.kept.reduce((sum, count) => sum + (count ?? 0), 0);
    return this.rounds ? 1 + accepted / this.rounds : 0;
  }
}

/** The text of an answer, and its reasoning apart from it, folded. */
export class Answer {
  constructor(parent) {
    this.tally = new Tally();
    this.text = this.reasoning = "";
    this.box = parent.appendChild(element("div", "text live"));
    this.thoughts = null;
  }

  add({ reasoning, text, tokens }) {
    this.tally.add(tokens);
    if (reasoning) this.reasoning += text;
    else this.text += text;
    const box = reasoning ? this.thoughtBox() : this.box;
    const spans = tokens.filter((token) => token.text).map(span);
    later(() => box.append(...spans));
  }

  thoughtBox() {
    if (!this.thoughts) {
      this.thoughts = element("details", "thoughts");
      this.thoughts.append(element("summary", "", "Reasoning"), element("div", "text"));
      this.box.before(this.thoughts);
    }
    return this.thoughts.lastElementChild;
  }

  /** No more tokens will come. */
  close(end) {
    if (end) this.tally.finish(end);
    later(() => this.box.classList.remove("live"));
  }

  /** One line of figures, each a short phrase. */
  figures(stopped) {
    const { tally } = this;
    const parts = [`${whole(tally.tokens)} ${tally.tokens === 1 ? "token" : "tokens"}`];
    if (tally.perSecond) parts.push(`${whole(tally.perSecond)} a second`);
    if (tally.kept.some(Boolean)) parts.push(`${round(tally.perRound)} a round`);
    parts.push(...drafting(tally.end?.speculative));
    if (stopped) parts.push("stopped");
    else if (tally.end?.finish === "length") parts.push("cut at max tokens");
    return parts;
  }
}

function drafting(speculative) {
  if (!speculative) return [];
  if (speculative.used === "none") return [speculative.reason ? `plain: ${speculative.reason}` : "plain"];
  return [`${speculative.used} to depth ${speculative.depth}`];
}

function span({ text, position }) {
  if (position === null) return element("span", "", text);
  const blank = text.trim() ? "" : " blank";
  const made = element("span", `token p${Math.min(position, MARKS)}${blank}`, text);
  made.title = position ? `draft ${position}, accepted` : "the model's own";
  return made;
}
