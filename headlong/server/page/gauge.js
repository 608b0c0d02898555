// The live gauge: tokens a second, tokens a round, the last rounds as columns, and how often each draft is accepted.

import { MARKS } from "./answer.js";
import { byId, element } from "./element.js";
import { later } from "./frame.js";
import { percent, round, whole } from "./words.js";

const CALM_MS = 120; // numbers that change faster cannot be read

export class Gauge {
  constructor() {
    this.speed = byId("speed");
    this.length = byId("length");
    this.rounds = byId("rounds");
    this.list = byId("origins");
    this.rows = [];
    this.shownAt = 0;
    this.positions(MARKS);
  }

  /** One row a position, up to the deepest that this model drafts; they are the legend too. */
  positions(deepest) {
    this.rows = [...Array(Math.min(deepest, MARKS)).keys()].map((place) => draftRow(place + 1));
    this.list.replaceChildren(ownRow(), ...this.rows.map((row) => row.item));
  }

  show(tally, now = performance.now()) {
    if (!tally.end && now - this.shownAt < CALM_MS) return;
    this.shownAt = now;
    later(() => this.draw(tally));
  }

  draw(tally) {
    this.speed.textContent = tally.perSecond ? whole(tally.perSecond) : "–";
    this.length.textContent = tally.perRound ? round(tally.perRound) : "–";
    this.rounds.replaceChildren(...tally.recent.filter((positions) => positions.length).map(column));
    this.rows.forEach((row, place) => {
      const share = tally.rounds ? (tally.kept[place] ?? 0) / tally.rounds : 0;
      row.fill.style.width = percent(share);
      row.share.textContent = tally.rounds ? percent(share) : "";
    });
  }
}

function column(positions) {
  const stack = element("i");
  stack.append(...positions.map((position) => element("b", `p${Math.min(position, MARKS)}`)));
  return stack;
}

function ownRow() {
  const item = element("li");
  item.append(sample("ab", 0), element("span", "", "the model itself"));
  return item;
}

function draftRow(position) {
  const item = element("li");
  const bar = element("span", "meter");
  const fill = bar.appendChild(element("span", `fill p${position}`));
  const share = element("span", "share");
  const shown = sample("", position);
  shown.append(element("span", "word", "draft "), String(position));
  item.append(shown, bar, share);
  return { item, fill, share };
}

function sample(text, position) {
  return element("span", `token p${position}`, text);
}
