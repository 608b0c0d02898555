// The settings of a request: a form on the page, kept by the browser, read into the fields of a body.

import { byId } from "./element.js";
import { load, save } from "./kept.js";
import { Refusal } from "./stream.js";

const RANGES = ["temperature", "top_p", "min_p"];
const WHOLE = { top_k: "Top k", max_tokens: "Max tokens" };
const DEEPEST = 8; // of any model

export class Settings {
  constructor() {
    this.form = byId("settings");
    this.fields = this.form.elements;
    this.depths(DEEPEST);
    this.restore();
    this.form.addEventListener("input", () => this.changed());
    this.form.addEventListener("reset", () => setTimeout(() => this.changed()));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.changed();
  }

  /** Depths up to the model's own, without losing what was chosen. */
  depths(deepest) {
    const { depth } = this.fields;
    const chosen = depth.value;
    const values = ["auto", ...Array(deepest + 1).keys()].map(String);
    depth.replaceChildren(...values.map((value) => new Option(value, value)));
    depth.value = values.includes(chosen) ? chosen : "auto";
  }

  /** What a request sends beside its messages. */
  read() {
    const body = {};
    for (const name of RANGES) body[name] = Number(this.fields[name].value);
    for (const [name, title] of Object.entries(WHOLE)) body[name] = wholeNumber(title, this.fields[name].value);
    if (this.fields.seed.value.trim()) body.seed = wholeNumber("Seed", this.fields.seed.value);
    body.speculative = { kind: this.fields.kind.value, depth: this.depth };
    if (body.speculative.kind === "none") delete body.speculative.depth;
    return body;
  }

  get depth() {
    const { value } = this.fields.depth;
    return value === "auto" ? value : Number(value);
  }

  get system() {
    const text = this.fields.system.value.trim();
    return text ? [{ role: "system", content: text }] : [];
  }

  changed() {
    for (const output of this.form.querySelectorAll("output")) {
      output.value = Number(this.fields[output.htmlFor.value].value).toFixed(2);
    }
    document.body.classList.toggle("plain-text", !this.fields.colours.checked);
    save("localStorage", "settings", this.snapshot());
  }

  snapshot() {
    const named = [...this.fields].filter((field) => field.name);
    return Object.fromEntries(named.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]));
  }

  restore() {
    for (const [name, value] of Object.entries(load("localStorage", "settings") ?? {})) {
      const field = this.fields[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = value;
      else field.value = value;
    }
    if (!this.fields.depth.value) this.fields.depth.value = "auto";
    if (!this.fields.kind.value) this.fields.kind.value = "auto";
  }
}

/** The server says what a number must be; here it only has to be one that JSON can carry. */
function wholeNumber(title, text) {
  const value = Number(text);
  if (text.trim() && Number.isSafeInteger(value)) return value;
  throw new Refusal(`${title} is “${text.trim()}”; it must be a whole number of at most 15 digits.`);
}
