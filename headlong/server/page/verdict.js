// How a race ended: which lane was faster, and whether the two texts are the same. Plain data in, sentences out.

import { round, seconds, whole } from "./words.js";

const EVEN = 1.02; // less than this is chance
const BEFORE = 24; // characters shown before and after a difference
const AFTER = 24;

/** The first place where two texts part, or -1. Never inside a pair of surrogates. */
export function firstDifference(left, right) {
  const shorter = Math.min(left.length, right.length);
  let place = 0;
  while (place < shorter && left[place] === right[place]) place += 1;
  if (place === left.length && place === right.length) return -1;
  const inside = place > 0 && /[\uD800-\uDBFF]/.test(left[place - 1]);
  return inside ? place - 1 : place;
}

/**
 * `drafted` and `plain` are lanes: {name, text, reasoning, tally, ended, refused}.
 * The outcome is {kind: "same" | "different" | "open", headline, detail, difference}.
 */
export function judge(drafted, plain) {
  const refused = [drafted, plain].find((lane) => lane.refused);
  if (refused) return { kind: "open", headline: "No result", detail: `${refused.name} could not run: ${refused.refused}` };
  const difference = compare(drafted, plain);
  if (!drafted.ended || !plain.ended) return stopped(difference);
  const kind = difference ? "different" : "same";
  const same = difference ? "the texts differ" : "identical text";
  return { kind, headline: `${faster(drafted, plain)}, ${same}`, detail: times(drafted, plain), difference };
}

function compare(drafted, plain) {
  for (const part of ["reasoning", "text"]) {
    const place = firstDifference(drafted[part], plain[part]);
    const open = !drafted.ended || !plain.ended;
    const within = place < Math.min(drafted[part].length, plain[part].length);
    if (place < 0 || (open && !within)) continue; // one that was stopped may just be shorter
    const line = drafted[part].slice(0, place).split("\n").length;
    const excerpt = (text) => ({ before: text.slice(Math.max(0, place - BEFORE), place), after: text.slice(place, place + AFTER) });
    return { part, place, line, drafted: excerpt(drafted[part]), plain: excerpt(plain[part]) };
  }
  return null;
}

function stopped(difference) {
  const agree = difference ? "The texts differ already." : "As far as both had come, the texts agree.";
  return { kind: difference ? "different" : "open", headline: "Stopped before the end", detail: agree, difference };
}

function faster(drafted, plain) {
  const ratio = drafted.tally.perSecond / plain.tally.perSecond;
  if (!Number.isFinite(ratio) || ratio <= 0) return "Too short to time";
  if (ratio < EVEN && ratio > 1 / EVEN) return "Equally fast";
  return ratio > 1 ? `${drafted.name} ${round(ratio)}× as fast` : `Plain ${round(1 / ratio)}× as fast`;
}

function times(drafted, plain) {
  const tokens = `${whole(drafted.tally.tokens)} tokens in ${seconds(drafted.tally.seconds)} with ${drafted.name}`;
  const other = drafted.tally.tokens === plain.tally.tokens ? "" : `${whole(plain.tally.tokens)} `;
  const speculative = drafted.tally.end?.speculative;
  const drafting =
    speculative?.used === "none"
      ? `Nothing was drafted${speculative.reason ? `: ${speculative.reason}` : ""}.`
      : `${drafted.name} gave ${round(drafted.tally.perRound)} tokens a round.`;
  return `${tokens}, ${other}in ${seconds(plain.tally.seconds)} without. ${drafting}`;
}
