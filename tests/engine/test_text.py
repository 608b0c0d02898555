"""The tokenizer and incremental decoding."""

import random
import unicodedata

import pytest
from tokenizers import Tokenizer, decoders, models, processors

from headlong.engine.text import LONGEST_WAIT, Text
from headlong.errors import UserError
from tests.engine.conftest import END, byte_tokenizer

TEXTS = [
    "plain words",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 and 🇫🇷 🏳️‍🌈",
    "a\u0301 e\u0308",
    "🙂" * 20,
    "�x�",
    "",
]


def fallback_text():
    """Words with a mark for the space before them, and bytes for what is not in the vocabulary."""
    names = ["<unk>", "▁", "▁Hello", "▁world", "Hello", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return Text(tokenizer), vocab


def decoded(text, tokens, prompt=()):
    decoder = text.decoder(prompt)
    return "".join([*(decoder.push(token) for token in tokens), decoder.flush()])


@pytest.mark.parametrize("string", TEXTS)
def test_pieces_together_are_the_text(text, string):
    assert decoded(text, text.encode(string)) == string


@pytest.mark.parametrize("string", TEXTS)
def test_no_piece_holds_half_a_character(text, string):
    decoder = text.decoder()
    for token in text.encode(string.replace("�", "")):
        assert "�" not in decoder.push(token)


def test_a_character_comes_with_its_last_byte(text):
    decoder = text.decoder()
    assert [decoder.push(token) for token in text.encode("é🙂!")] == ["", "é", "", "", "", "🙂", "!"]


def test_tokens_may_all_end_inside_a_character():
    string = "é" * 40
    lead, tail = byte_tokenizer().encode("é").tokens
    text = Text(byte_tokenizer([(tail, lead)]))
    tokens = text.encode(string)
    assert len(tokens) == 41
    decoder = text.decoder()
    assert [decoder.push(token) for token in tokens] == ["", *["é"] * 40]
    assert decoder.flush() == ""


def test_bad_bytes_are_shown_and_do_not_pile_up(text):
    lone = text.encode("é")[1]
    decoder = text.decoder()
    pieces = [decoder.push(lone) for _ in range(100)]
    assert len(decoder._pending) <= LONGEST_WAIT
    assert "".join([*pieces, decoder.flush()]) == "�" * 100
    assert decoded(text, [lone, *text.encode("ok 🙂")]) == "�ok 🙂"


def test_text_cut_inside_a_character_ends_in_the_mark_for_it(text):
    assert decoded(text, text.encode("ab🙂")[:-1]) == "ab�"


@pytest.mark.parametrize("seed", range(40))
def test_any_bytes_read_as_they_do_together(text, seed):
    rng = random.Random(seed)
    tokens = [rng.choice(text.encode("aé日🙂")) for _ in range(80)]
    assert decoded(text, tokens) == text.decode(tokens)


def test_special_and_unknown_tokens_have_no_text(text, end):
    a, b = text.encode("ab")
    assert decoded(text, [end, a, end, end, b, 10_000]) == "ab"
    half, other = text.encode("é")
    assert decoded(text, [half, end, other]) == "é"


def test_the_space_before_a_word_depends_on_what_was_before():
    text, vocab = fallback_text()
    hello, world = vocab["▁Hello"], vocab["▁world"]
    assert decoded(text, [hello, world, world]) == "Hello world world"
    assert decoded(text, [world], prompt=[hello]) == " world"


@pytest.mark.parametrize("string", ["é", "日本語", "🙂🙂🙂é🙂"])
def test_single_bytes_in_a_run_become_characters_one_by_one(string):
    text, vocab = fallback_text()
    tokens = [vocab[f"<0x{byte:02X}>"] for byte in string.encode()]
    decoder = text.decoder()
    assert [piece for token in tokens if (piece := decoder.push(token))] == list(string)
    assert decoded(text, tokens, prompt=tokens * 9) == string


def test_a_bad_byte_after_a_good_run_does_not_take_it_back():
    text, vocab = fallback_text()
    good = [vocab[f"<0x{byte:02X}>"] for byte in "é".encode()]
    assert decoded(text, [*good, vocab["<0xFF>"], vocab["Hello"]]) == "é�Hello"


def test_encoding_recognises_special_tokens_and_adds_the_tokenizers_own(end):
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])
    text = Text(tokenizer)
    assert text.encode(f"a{END}") == [end, *byte_tokenizer().encode("a").ids, end]


def test_a_training_length_in_the_tokenizer_is_ignored():
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    assert len(Text(tokenizer).encode("abcdef")) == 6


def test_a_folder_is_read(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    text = Text.from_folder(tmp_path)
    assert text.decode(text.encode(unicodedata.lookup("SNOWMAN"))) == "☃"
    assert not text.has_chat_template


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer.json; give a model folder that has one\.$"):
        Text.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "version https://example.org", '{"version": "1.0", '])
def test_half_a_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="is not whole JSON; download it again"):
        Text.from_folder(tmp_path)


def test_a_token_has_bytes_of_its_own(text, end):
    tokens = text.encode("é☃")
    assert b"".join(map(text.bytes_of, tokens)) == "é☃".encode()
    assert text.bytes_of(end) == END.encode()
    assert text.bytes_of(10_000) == b""
    assert text.has_token(END)
    assert not text.has_token("<think>")


def test_half_a_character_is_refused():
    text = Text(byte_tokenizer())
    for encode in (text.encode, text.encode_rendered):
        with pytest.raises(UserError, match="half a character at position 2; leave it out"):
            encode("ab\ud83dcd")


def test_whole_tokens_are_decoded_once_and_broken_ones_with_those_before_them(text, monkeypatch):
    """As a decoder that never knows a token by itself."""
    coin, pool = random.Random(0), [token for string in TEXTS for token in text.encode(string)]
    tokens = [coin.choice(pool) for _ in range(2000)]
    found, decoder = [], text.decoder(tokens[:7])
    for token in tokens:
        found.append(decoder.push(token))
    monkeypatch.setattr(text, "joins", False)
    decoder = text.decoder(tokens[:7])
    assert found == [decoder.push(token) for token in tokens]
    assert any("�" in piece for piece in found)
