"""The words that drafts may be: those a text brings find a place, and their logits are the LM head's."""

import pytest
import torch

pytest.importorskip("triton")

from headlong.backends.torch.gpu.lexicon import ABSENT, Lexicon

VOCAB, PLACES, SIZE = 200, 32, 48


@pytest.fixture
def matrix(device, normal):
    return normal(VOCAB, SIZE).to(device)


@pytest.fixture
def lexicon(matrix):
    return Lexicon(matrix, PLACES, large=64)


def learn(lexicon, tokens):
    lexicon.learn(torch.tensor(tokens, device=lexicon.where.device))


def whole(lexicon):
    """Places and words agree, and every word has one place."""
    words = lexicon.words.tolist()
    assert len(set(words)) == len(words)
    where = lexicon.where.tolist()
    assert [where[word] for word in words] == list(range(len(words)))
    assert sum(place != ABSENT.value for place in where) == len(words)
    return set(words)


def test_the_first_of_the_vocabulary_are_there_at_the_beginning(lexicon):
    assert whole(lexicon) == set(range(PLACES))


def test_words_of_a_text_come_in_and_the_rarest_beginners_go(lexicon):
    learn(lexicon, [3, 150, 7, 199, 150, 40])
    assert whole(lexicon) == {*range(PLACES - 3), 150, 199, 40}


def test_words_that_are_there_move_nothing(lexicon):
    before = lexicon.words.clone()
    learn(lexicon, list(range(PLACES)))
    assert torch.equal(lexicon.words, before)


def test_places_are_taken_again_when_all_were(lexicon):
    for token in range(PLACES, VOCAB):
        learn(lexicon, [token])
    assert whole(lexicon) == set(range(VOCAB - PLACES, VOCAB))


def test_logits_are_those_of_the_words(lexicon, matrix, normal):
    learn(lexicon, [150, 199, 40])
    hidden = normal(5, SIZE).to(matrix.device)
    wanted = hidden @ matrix[lexicon.words].T
    assert (lexicon.logits(hidden) - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_a_learnt_row_is_rounded_as_one_that_was_there(lexicon, matrix):
    learn(lexicon, [150])
    place = int(lexicon.where[150])
    whole_copy = Lexicon(matrix, VOCAB)
    assert whole_copy.words is None
    assert (lexicon.codes[place].int() - whole_copy.codes[150].int()).abs().max() <= 1
    assert torch.allclose(lexicon.scales[place], whole_copy.scales[150])


def test_a_small_vocabulary_is_there_whole(matrix):
    lexicon = Lexicon(matrix, PLACES, large=VOCAB + 1)
    learn(lexicon, [150])
    assert lexicon.words is None
    assert lexicon.codes.shape == matrix.shape
