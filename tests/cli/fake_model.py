"""The real engine over the scripted backend, behind the real command line: `python -m tests.cli.fake_model bench`."""

import sys
import time

import headlong
from headlong.backends.fake import FakeBackend, fake_limits
from headlong.cli.main import entrypoint
from headlong.engine.engine import Engine
from headlong.engine.template import ChatTemplate
from headlong.engine.text import Text
from headlong.settings import Settings
from tests.engine.conftest import byte_tokenizer

END = 256  # the token after the bytes
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def next_letter(history):
    """Small letters in a ring, whatever came before."""
    return 97 + (history[-1] - 96) % 26 if 97 <= history[-1] < 123 else 97


class Careless(FakeBackend):
    """Windows with three drafts change the last token they give."""

    def _accept(self, row, drafts):
        kept = super()._accept(row, drafts)
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
    def round(self, plan):
        time.sleep(0.002)
        return super().round(plan)


BACKENDS = {"careless": Careless, "interrupted": Interrupted, "impatient": Impatient, "slow": Slow}


def load(name=None, *, require_draft=False, **settings):
    """Some names make it do what a true model might."""
    script = (lambda history: END) if name == "silent" else next_letter
    depth = 0 if name == "headless" else 8
    limits = fake_limits(rows=1, context=4096, page=128, chunk=512, vocab=300, depth=depth)
    backend = BACKENDS.get(name, FakeBackend)(script, right=(True, True, False), limits=limits)
    template = None if name == "templateless" else ChatTemplate(TEMPLATE, {})
    return Engine(backend, Text(byte_tokenizer(), template), name or "nano", (END,), Settings(**settings))


if __name__ == "__main__":
    headlong.load = load
    sys.exit(entrypoint())
