// The conversation: turns of a user and of the model, and what goes back to the server with the next one.

import { Answer } from "./answer.js";
import { byId, element } from "./element.js";
import { follow, later } from "./frame.js";
import { told } from "./stream.js";

export class Chat {
  /** `page` gives what both views share: settings, gauge, ask, say. */
  constructor(page) {
    this.page = page;
    this.view = byId("chat");
    this.log = byId("log");
    this.again = byId("new-chat");
    this.messages = [];
    this.again.addEventListener("click", () => this.clear());
    follow(this.view);
  }

  clear() {
    this.page.stop();
    this.messages = [];
    this.log.replaceChildren();
    this.view.classList.remove("begun");
    this.again.hidden = true;
    byId("message").focus();
  }

  async send(text, signal) {
    const past = this.messages;
    const message = { role: "user", content: text };
    this.view.classList.add("begun");
    this.again.hidden = false;
    this.turn("user", "You").appendChild(element("p", "said", text));
    const turn = this.turn("model", this.page.name);
    const answer = new Answer(turn);
    later(() => (this.view.scrollTop = this.view.scrollHeight));
    this.log.setAttribute("aria-busy", "true"); // read out when it is complete
    try {
      const stopped = await this.fill(answer, [...past, message], signal);
      later(() => turn.append(element("p", "figures", answer.figures(stopped).join(" · "))));
      // A new chat may have begun meanwhile.
      if (answer.text && past === this.messages) this.messages = [...past, message, { role: "assistant", content: answer.text }];
    } catch (error) {
      this.refuse(turn, told(error), text);
    } finally {
      this.log.setAttribute("aria-busy", "false");
    }
  }

  /** Stream into the answer; whether it was stopped. */
  async fill(answer, messages, signal) {
    const { settings, gauge, ask } = this.page;
    let end = null;
    try {
      const body = { messages: [...settings.system, ...messages], ...settings.read() };
      for await (const piece of ask(body, signal)) {
        if (piece.kind === "end") end = piece;
        else answer.add(piece);
        gauge.show(answer.tally);
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      return true;
    } finally {
      answer.close(end);
      if (end) gauge.show(answer.tally);
      this.page.say(answer.figures(!end).join(", "));
    }
    return false;
  }

  refuse(turn, sentence, text) {
    const notice = element("p", "error", sentence);
    notice.setAttribute("role", "alert");
    const again = element("button", "quiet", "Try again");
    again.type = "button";
    again.addEventListener("click", () => {
      if (this.page.running) return;
      turn.previousElementSibling.remove();
      turn.remove();
      this.page.submit(text);
    });
    later(() => turn.append(notice, again));
  }

  turn(kind, who) {
    const article = this.log.appendChild(element("article", `turn ${kind}`));
    article.append(element("h3", "", who));
    return article;
  }
}
