"""The real engine over the scripted backend, behind the real command line: `python -m tests.cli.fake_model bench`."""

import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import headlong
from headlong.backends.fake import FakeBackend, fake_limits
from headlong.cli.main import entrypoint
from headlong.engine import tuning
from headlong.engine.engine import Engine
from headlong.engine.request import RoundResult
from headlong.engine.template import ChatTemplate
from headlong.engine.text import Text
from headlong.settings import Settings
from tests.engine.conftest import byte_tokenizer

END = 256  # the token after the bytes
LETTERS = 64  # the token of a small a
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def next_letter(history):
    """Small letters in a ring, whatever came before."""
    return LETTERS + (history[-1] - LETTERS + 1) % 26 if LETTERS <= history[-1] < LETTERS + 26 else LETTERS


def recite(answer):
    """A script that says what `answer` makes of the prompt before the last mark of an assistant."""
    text = Text(byte_tokenizer())

    def script(history):
        prompt, _, said = text.decode(history).rpartition("<assistant>")
        return (*text.encode(answer(prompt)), END)[len(said)]

    return script


def retell(prompt):
    """All messages, each after the first letter of who said it: "u:hello a:hi u:and?"."""
    return re.sub(r"<(\w)\w*>", r" \1:", prompt).strip()


class Careless(FakeBackend):
    """Windows with three drafts change the last token they give."""

    def _accept(self, row, drafts, masks):
        kept = super()._accept(row, drafts, masks)
        return (*kept[:-1], kept[-1] + 1) if len(drafts) == 3 else kept


class Interrupted(FakeBackend):
    """Somebody presses Ctrl-C after so many rounds."""

    patience = 150

    def round(self, plan):
        if len(self.rounds) >= self.patience:
            raise KeyboardInterrupt
        return super().round(plan)


class Impatient(Interrupted):
    patience = 30


class Slow(FakeBackend):
    pause_s = 0.002

    def round(self, plan):
        time.sleep(self.pause_s)
        return super().round(plan)


class Sluggish(Slow):
    """Rounds that last longer than somebody's patience."""

    pause_s = 0.5


class Faulty(FakeBackend):
    """Rounds break after a while."""

    def round(self, plan):
        if len(self.rounds) >= 3:
            raise RuntimeError("a cable\nwas cut.")
        return super().round(plan)


@dataclass(frozen=True)
class Timed:
    """A round that says what it cost."""

    done: RoundResult

    def result(self):
        return self.done


class Clocked(FakeBackend):
    """Rounds take 2 ms and 0.1 ms a token, sampled ones twice that; a draft step takes 0.2 ms, the first 0.5 ms."""

    def round(self, plan):
        kept = super().round(plan).result().kept
        tokens = sum(1 + part.verify for part in plan)
        pace = 1 if all(self.rows[part.row].start.sampling.greedy for part in plan) else 2
        draft = max(part.draft for part in plan)
        draft_s = 5e-4 + 2e-4 * (draft - 1) if draft else 0.0
        return Timed(RoundResult(kept, pace * (2e-3 + 1e-4 * tokens), draft_s))


BACKENDS = {
    "careless": Careless,
    "interrupted": Interrupted,
    "impatient": Impatient,
    "slow": Slow,
    "sluggish": Sluggish,
    "faulty": Faulty,
    "clocked": Clocked,
    "headless": Clocked,
}


SCRIPTS = {
    "silent": lambda history: END,
    "parrot": recite(retell),
    "thinker": recite(lambda prompt: "<think>\nhm\n</think>\n\nyes"),
}


def load(name=None, *, require_draft=False, **settings):
    """Some names make it do what a true model might."""
    chosen = Settings(**settings)
    script = SCRIPTS.get(name, next_letter)
    context = chosen.context or 4096
    limits = fake_limits(rows=chosen.rows, context=context, page=128, chunk=512, vocab=300, head=name != "headless")
    limits = replace(limits, device=f"abacus with {chosen.threads or 2} beads")
    backend = BACKENDS.get(name, FakeBackend)(script, right=(True, True, False), limits=limits)
    template = None if name == "templateless" else ChatTemplate(TEMPLATE, {})
    costs = tuning.read(tuning.where(folder_of(name), limits))
    return Engine(backend, Text(byte_tokenizer(), template), name or "nano", (END,), chosen, costs)


def folder_of(name):
    """No such folder exists, so it is as good as empty."""
    return Path("/nowhere") / (name or "nano")


if __name__ == "__main__":
    headlong.load = load
    tuning.folder_of = folder_of
    sys.exit(entrypoint())
