// The API key: asked for when the server wants one, and kept in this tab.

import { byId } from "./element.js";
import { load, save } from "./kept.js";

export class Key {
  constructor() {
    this.form = byId("key-form");
    this.field = byId("key");
    this.why = byId("key-why");
    this.value = load("sessionStorage", "key") ?? "";
    this.asking = null;
  }

  /** Resolves when a key was typed in. Two requests that are refused together share one question. */
  ask() {
    this.asking ??= this.question().finally(() => {
      this.form.hidden = true;
      this.asking = null;
    });
    return this.asking;
  }

  question() {
    this.why.textContent = this.value
      ? "The server did not accept the key. Try another one."
      : "This server asks for an API key: the one it was started with.";
    this.form.hidden = false;
    this.field.value = "";
    this.field.focus();
    return new Promise((resolve, reject) => {
      this.form.onsubmit = (event) => {
        event.preventDefault();
        this.value = this.field.value.trim();
        save("sessionStorage", "key", this.value);
        resolve();
      };
      this.dismiss = () => reject(new DOMException("stopped", "AbortError"));
    });
  }

  /** Run what needs the key, again with each key that is typed in until one is accepted. */
  async try(action) {
    while (true) {
      try {
        return await action(this.value);
      } catch (error) {
        if (error.status !== 401) throw error;
        await this.ask();
      }
    }
  }
}
