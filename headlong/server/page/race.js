// The race: one prompt in two lanes at once, with drafts and without, and a verdict that this page reaches itself.

import { Answer, MARKS } from "./answer.js";
import { byId, element } from "./element.js";
import { follow, later } from "./frame.js";
import { told } from "./stream.js";
import { judge } from "./verdict.js";
import { seconds, whole } from "./words.js";

const LEAST_TRACK = 40; // tokens that fill the track at the start
const LEAD = 1.15; // the track is this much longer than the leader has come
const NAMES = { mtp: "MTP", ngram: "N-gram" };
const DEPTHS = { mtp: 3, ngram: 8 }; // left to itself the server drafts little beside a plain answer, which loses by it
const SEEDS = 2 ** 31;

export class Race {
  /** `page` gives what both views share: settings, gauge, ask, say. */
  constructor(page) {
    this.page = page;
    this.view = byId("race");
    this.contest = byId("contest");
    this.verdict = byId("verdict");
    this.note = byId("race-note");
    this.prompt = byId("race-prompt");
  }

  async send(text, signal) {
    this.view.classList.add("begun");
    this.contest.hidden = false;
    this.prompt.textContent = text;
    this.show({ kind: "running", headline: "On your marks", detail: "" });
    this.note.textContent = "";
    const lanes = [new Lane("drafted", NAMES[this.kind]), new Lane("plain", "Plain")];
    const draw = () => this.draw(lanes);
    draw();
    try {
      const bodies = this.bodies(text);
      this.tell(bodies[0]);
      await Promise.all(lanes.map((lane, place) => this.run(lane, bodies[place], draw, signal)));
      this.announce(judge(...lanes));
    } catch (error) {
      this.announce({ kind: "open", headline: "No result", detail: told(error) });
    }
  }

  /** What the left lane drafts with: the page is about a model's own head, so that one unless n-grams are asked for. */
  get kind() {
    return this.page.settings.fields.kind.value === "ngram" ? "ngram" : "mtp";
  }

  /** The same request twice, but for drafting. Without a seed sampled texts would differ by chance, so one is drawn. */
  bodies(text) {
    const { settings } = this.page;
    const shared = { messages: [...settings.system, { role: "user", content: text }], ...settings.read() };
    if (shared.temperature > 0) shared.seed ??= Math.floor(Math.random() * SEEDS);
    const asked = settings.depth === "auto" ? 0 : settings.depth; // depth 0 would be plain decoding twice
    const speculative = { kind: this.kind, depth: asked || DEPTHS[this.kind] };
    return [{ ...shared, speculative }, { ...shared, speculative: { kind: "none" } }];
  }

  async run(lane, body, draw, signal) {
    const { ask, gauge } = this.page;
    const gauged = body.speculative.kind !== "none";
    let end = null;
    try {
      for await (const piece of ask(body, signal)) {
        if (piece.kind === "end") end = piece;
        else lane.answer.add(piece);
        if (gauged) gauge.show(lane.tally);
        later(draw);
      }
    } catch (error) {
      if (error.name !== "AbortError") lane.refuse(told(error));
    }
    lane.ended = Boolean(end);
    lane.answer.close(end);
    if (end && gauged) gauge.show(lane.tally);
    later(draw);
  }

  /** Until one lane has ended nobody knows how long the text is: the track grows with the leader. */
  draw(lanes) {
    const [leader, other] = lanes.toSorted((one, two) => two.tally.tokens - one.tally.tokens);
    const [first, second] = [leader.tally.tokens, other.tally.tokens];
    const track = leader.ended ? first : Math.max(LEAST_TRACK, first * LEAD);
    for (const lane of lanes) lane.draw(track);
    if (!second || other.ended) return;
    const ratio = (first / second).toFixed(1);
    const headline = leader.ended
      ? `${leader.name} is done, ${other.name} still writes`
      : `${leader.name} has ${ratio}× the tokens so far`;
    this.show({ kind: "running", headline, detail: "" });
  }

  tell({ temperature, seed, speculative }) {
    const how = temperature > 0 ? `temperature ${temperature}, seed ${seed}` : "greedy";
    this.note.textContent =
      `Both were sent at once (${how}) and share this machine while they run, so each is slower than it would be alone. ` +
      `${NAMES[this.kind]}: depth ${speculative.depth}. Times are the server's, from first round to last; ` +
      "headlong bench takes them one at a time.";
  }

  announce(outcome) {
    later(() => this.show(outcome));
    this.page.say(`${outcome.headline}. ${outcome.detail}`);
  }

  show({ kind, headline, detail, difference }) {
    this.verdict.className = `verdict ${kind}`;
    this.verdict.replaceChildren(element("strong", "", headline), element("span", "", detail));
    if (difference) this.verdict.append(...differenceShown(difference));
  }
}

/** One side of the race: its answer, its bar and its pace. */
class Lane {
  constructor(id, name) {
    this.name = name;
    this.ended = false;
    this.refused = "";
    const part = (suffix) => byId(`${id}-${suffix}`);
    [this.bar, this.pace, this.box] = [part("bar"), part("pace"), part("lane")];
    part("name").textContent = part("title").textContent = name;
    this.box.replaceChildren();
    this.answer = new Answer(this.box);
    follow(this.box);
  }

  get tally() {
    return this.answer.tally;
  }

  get text() {
    return this.answer.text;
  }

  get reasoning() {
    return this.answer.reasoning;
  }

  refuse(sentence) {
    this.refused = sentence;
    const notice = element("p", "error", sentence);
    later(() => this.box.append(notice));
  }

  draw(track) {
    const { tally, bar } = this;
    bar.style.width = `${Math.min(100, (100 * tally.tokens) / track)}%`;
    bar.replaceChildren(...parts(tally));
    this.pace.textContent = tally.perSecond ? `${whole(tally.perSecond)} tok/s` : "";
    if (this.ended) this.pace.append(element("span", "time", `, ${seconds(tally.seconds)}`));
    this.pace.classList.toggle("done", this.ended);
  }
}

/** A bar's parts by origin, each as long as its share of tokens. */
function parts(tally) {
  const kept = Array.from({ length: MARKS }, (_, place) => tally.kept[place] ?? 0);
  const own = Math.max(0, tally.tokens - kept.reduce((sum, count) => sum + count, 0));
  return [own, ...kept].flatMap((count, position) => {
    if (!count) return [];
    const part = element("i", `p${position}`);
    part.style.flexGrow = count;
    return [part];
  });
}

function differenceShown({ part, line, place, drafted, plain }) {
  const subject = part === "text" ? "The texts part" : "The reasoning parts";
  const where = `${subject} at character ${whole(place + 1)}, in line ${whole(line)}:`;
  const shown = [["with drafts", drafted], ["without", plain]].map(([name, { before, after }]) => {
    const row = element("span", "parting");
    row.append(element("em", "", name), `…${before}`, element("mark", "", after || "(ends here)"));
    return row;
  });
  return [element("span", "", where), ...shown];
}
