// The page: finds out which model answers, and hands what is typed to the chat or to the race.

import { Chat } from "./chat.js";
import { byId, element } from "./element.js";
import { Gauge } from "./gauge.js";
import { Key } from "./key.js";
import { Race } from "./race.js";
import { Settings } from "./settings.js";
import { getJson, stream, told } from "./stream.js";
import { whole } from "./words.js";

const EXAMPLES = [
  "Write a function that counts the words in a file.",
  "Write a function that merges two sorted lists.",
  "Write a function that reads a CSV file and returns its rows as dictionaries.",
];
const TALLEST = 200; // pixels a message grows to before it scrolls

class Page {
  constructor() {
    this.settings = new Settings();
    this.gauge = new Gauge();
    this.key = new Key();
    this.message = byId("message");
    this.name = "Model";
    this.running = null; // aborts what is under way
    this.ask = this.ask.bind(this);
    this.views = { chat: new Chat(this), race: new Race(this) };
    this.open("chat");
    this.listen();
    this.describe().catch((error) => this.unknown(error));
  }

  // --- the model -------------------------------------------------------------------------------------------------

  /** Which model it is and what it can draft, asked once. */
  async describe() {
    if (this.model) return;
    const { data } = await this.key.try((key) => getJson("v1/models", key));
    const { id, headlong: about = {} } = data[0];
    this.model = id;
    this.name = id.split("/").at(-1);
    const parts = [this.name];
    if (about.context) parts.push(`${whole(about.context)} tokens of context`);
    if (about.drafts === false) parts.push(`no drafts: ${about.reason || "it has no head"}`);
    byId("model").textContent = byId("model").title = parts.join(", ");
    if (about.max_depth) {
      this.settings.depths(about.max_depth);
      this.gauge.positions(about.max_depth);
    }
  }

  unknown(error) {
    byId("model").textContent = error.name === "AbortError" ? "Not known without a key" : told(error);
  }

  /** The pieces of one answer; asks for a key first where the server wants one. */
  async *ask(body, signal) {
    await this.describe();
    const [pieces, first] = await this.key.try(async (key) => {
      const begun = stream({ model: this.model, ...body }, key, signal);
      return [begun, await begun.next()];
    });
    if (!first.done) yield first.value;
    yield* pieces;
  }

  // --- one thing at a time ---------------------------------------------------------------------------------------

  async submit(text) {
    if (this.running || !text.trim()) return;
    this.running = new AbortController();
    this.busy(true);
    try {
      await this.views[this.opened].send(text.trim(), this.running.signal);
    } finally {
      this.running = null;
      this.busy(false);
    }
  }

  stop() {
    this.key.dismiss?.();
    this.running?.abort();
  }

  busy(yes) {
    byId("send").hidden = yes;
    byId("stop").hidden = !yes;
    if (yes) this.say("Answering.");
  }

  /** For those who hear the page. */
  say(text) {
    byId("status").textContent = text;
  }

  // --- what people do --------------------------------------------------------------------------------------------

  open(name) {
    this.opened = name;
    for (const view of Object.keys(this.views)) {
      const tab = byId(`tab-${view}`);
      tab.setAttribute("aria-selected", String(view === name));
      tab.tabIndex = view === name ? 0 : -1;
      byId(view).hidden = view !== name;
    }
    document.body.dataset.view = name;
    byId("send").textContent = name === "race" ? "Race" : "Send";
    this.message.placeholder = name === "race" ? "A prompt for both lanes" : "Ask for something";
  }

  listen() {
    for (const view of Object.keys(this.views)) {
      byId(`tab-${view}`).addEventListener("click", () => this.open(view));
      byId(view).querySelector(".examples").append(...EXAMPLES.map((text) => this.example(text)));
    }
    document.querySelector(".tabs").addEventListener("keydown", (event) => this.arrow(event));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.typed();
    });
    this.message.addEventListener("input", () => this.grow());
    this.message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.typed();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("open-settings").addEventListener("click", () => this.showSettings(!this.settingsShown));
    byId("close-settings").addEventListener("click", () => this.showSettings(false));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this.settingsShown) this.showSettings(false);
      else this.stop();
    });
  }

  typed() {
    if (this.running || !this.message.value.trim()) return;
    const text = this.message.value;
    this.message.value = "";
    this.grow();
    this.message.focus();
    this.submit(text);
  }

  example(text) {
    const button = element("button", "example", text);
    button.type = "button";
    button.addEventListener("click", () => this.submit(text));
    return button;
  }

  grow() {
    this.message.style.height = "auto";
    this.message.style.height = `${Math.min(this.message.scrollHeight + 2, TALLEST)}px`;
  }

  arrow(event) {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    this.open(this.opened === "chat" ? "race" : "chat");
    byId(`tab-${this.opened}`).focus();
  }

  get settingsShown() {
    return document.body.classList.contains("settings-shown");
  }

  /** On a narrow screen the settings lie over the page; on a wide one they are always there. */
  showSettings(yes) {
    document.body.classList.toggle("settings-shown", yes);
    byId("open-settings").setAttribute("aria-expanded", String(yes));
    byId(yes ? "close-settings" : "open-settings").focus();
  }
}

new Page();
