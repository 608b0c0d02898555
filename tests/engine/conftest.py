"""A small tokenizer, and engines over the scripted backend."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headlong.backends.fake import FakeBackend, fake_limits
from headlong.engine.engine import Engine
from headlong.engine.text import Text
from headlong.settings import Settings

END = "<end>"


def byte_tokenizer(merges=()):
    """One token a byte, then the merged pairs, then the end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = letters + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


@pytest.fixture(scope="session")
def text():
    return Text(byte_tokenizer())


@pytest.fixture(scope="session")
def end(text):
    return text.encode(END)[0]


@pytest.fixture
def build(text, end):
    """An engine, its backend in reach; the arguments are those of the fake and of its limits."""

    def make(script, right=(True,), settings=None, backend=FakeBackend, **limits):
        fake = backend(script, right=right, limits=fake_limits(**{"vocab": 300, **limits}))
        engine = Engine(fake, text, "fake", (end,), settings or Settings())
        engine.backend = fake
        return engine

    return make


@pytest.fixture
def says(text, end):
    """A model that answers every prompt with this text, then the end token for ever."""

    def script_for(answer, prompt_length=1):
        tokens = text.encode(answer)

        def script(history):
            place = len(history) - prompt_length
            return tokens[place] if place < len(tokens) else end

        return script

    return script_for
