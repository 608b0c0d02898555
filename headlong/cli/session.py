"""A chat under way: what was said, how it is answered, and what the answers came to."""

import secrets
from typing import TYPE_CHECKING, Any

from headlong.cli import show, summary
from headlong.cli.conversation import Conversation, Message
from headlong.cli.drive import drive, refuse_faults
from headlong.engine.channels import Channels
from headlong.engine.intake import requests_from
from headlong.engine.request import Output
from headlong.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headlong.engine.engine import Engine

MAKE_ROOM = "/undo takes the last turn back, /reset begins anew"
TAIL = 8  # last tokens of a prompt, in which a template may have opened the reasoning


class Session:
    """Answers go to standard output, all else to standard error. Where somebody types, Ctrl-C ends an answer alone."""

    def __init__(
        self, engine: "Engine", conversation: Conversation, options: dict[str, Any], typed: bool, loudness: int = 0
    ) -> None:
        """`options` are those of every request; `loudness` is 1 for more figures and -1 for none."""
        self.engine, self.conversation, self.options = engine, conversation, options
        self.typed, self.loudness = typed, loudness
        self.over = False
        self.answers: list[tuple[int | None, Output]] = []  # with the depth that was asked for
        self._out, self._aside = show.open_console(), show.open_console(stderr=True)

    # --- answers -------------------------------------------------------------------------------------------------

    def say(self, asked: str) -> None:
        """One turn. One that cannot be answered leaves no trace."""
        self._answer([*self.conversation.messages, Message("user", asked)])

    def retry(self) -> None:
        """Answer the last question again."""
        asked = self.conversation.asked()
        before = self.conversation.messages[len(asked) :]
        self._answer(asked)
        settled = self.options["temperature"] == 0 or self.options["seed"] is not None
        if settled and self.conversation.messages[len(asked) :] == before:
            self.tell("the same answer again; with /temperature 0.8 and /seed none others are drawn")

    def _answer(self, messages: "Sequence[Message]") -> None:
        prompt = self._prompt(messages)
        output, view = self._run(prompt, self.options)
        stopped = output.finish_reason == "cancelled"
        self.conversation.messages = [*messages, Message("assistant", view.content, view.reasoning, stopped)]
        self.answers.append((self.options["depth"], output))
        self._tell_figures(output, self.options["depth"])
        if self.loudness >= 0:
            self._tell_end(output)
        self._leave_if_stopped(output)

    def race(self) -> None:
        """Answer the last question plain and with drafts, and compare; the conversation stays as it is."""
        if self.engine.settings.draft_kind == "none":
            raise UserError("drafting is turned off in this chat; start it without --no-mtp to race.")
        prompt = self._prompt(self.conversation.asked())
        seed = secrets.randbits(63) if self.options["seed"] is None else self.options["seed"]
        kinds: dict[str, dict[str, Any]] = {
            "plain": {"draft_kind": "none"},
            "with drafts": {"depth": self.options["depth"] or None},
        }
        outputs = []
        for name, own in kinds.items():
            self.tell(f"{name}:")
            options = self.options | own | {"seed": seed}
            output, _ = self._run(prompt, options)
            self._tell_figures(output, options["depth"])
            self._leave_if_stopped(output)
            if output.finish_reason in ("cancelled", "deadline"):
                raise UserError("the race was cut short, so there is nothing to compare; /race runs it again.")
            outputs.append(output)
        self.tell(summary.verdict(*outputs))

    def _prompt(self, messages: "Sequence[Message]") -> list[int]:
        return self.engine.text.encode_chat([one.as_dict() for one in self.conversation.whole(messages)])

    def _run(self, prompt: list[int], options: dict[str, Any]) -> tuple[Output, show.Talk]:
        context = self.engine.limits.context
        room = context - len(prompt)
        if room < 1:
            raise UserError(f"with this the conversation has {len(prompt)} tokens and {context} fit; {MAKE_ROOM}.")
        requests = requests_from(prompt, options | {"max_tokens": min(options["max_tokens"], room)})
        view = show.Talk(self._out, Channels.after(self.engine.text.decode(prompt[-TAIL:])))
        [output] = drive(self.engine, requests, view, insist=not self.typed)
        refuse_faults([output], traced=self.loudness > 0)
        return output, view

    def _leave_if_stopped(self, output: Output) -> None:
        """Where nobody types, nobody could say more after a Ctrl-C."""
        if output.finish_reason == "cancelled" and not self.typed:
            raise KeyboardInterrupt

    # --- what it came to -----------------------------------------------------------------------------------------

    def tell(self, line: str, style: str = show.ASIDE) -> None:
        show.write(self._aside, f"{line}\n", style)

    def tell_colours(self) -> None:
        show.legend(self._aside)

    def stats(self) -> None:
        """The figures of all answers, those of every depth together, and how full the context is."""
        for depth in dict.fromkeys(depth for depth, _ in self.answers):
            outputs = [output for asked, output in self.answers if asked == depth]
            seconds = sum(output.timings.decode_s for output in outputs)
            self.tell(summary.figures(outputs, seconds, summary.Asked([""] * len(outputs), depth=depth)))
        if self.answers:
            self.tell("\n".join(summary.spent([output for _, output in self.answers])))
        messages = self.conversation.messages
        tokens = len(self._prompt(messages)) if messages else 0
        count = summary.count(len(messages), "message")
        self.tell(f"the conversation: {count}, {tokens} of {self.engine.limits.context} tokens")

    def _tell_figures(self, output: Output, depth: int | None) -> None:
        if self.loudness < 0:
            return
        stopped = ", stopped" if output.finish_reason == "cancelled" else ""
        self.tell(summary.figures([output], output.timings.decode_s, summary.Asked([""], depth=depth)) + stopped)
        if self.loudness > 0:
            self.tell("\n".join(summary.spent([output])))

    def _tell_end(self, output: Output) -> None:
        """Why an answer ended that the model would have gone on with."""
        if output.finish_reason == "length" and len(output.tokens) == self.options["max_tokens"]:
            self.tell(f"ended at {len(output.tokens)} tokens; /max N allows more")
        elif output.finish_reason == "length":
            self.tell(f"the context of {self.engine.limits.context} tokens is full; {MAKE_ROOM}")

    # --- what can be changed -------------------------------------------------------------------------------------

    def change(self, **options: Any) -> None:
        """Ask every later answer for this, or refuse it."""
        changed = self.options | options
        requests_from("?", changed)
        self.options = changed
