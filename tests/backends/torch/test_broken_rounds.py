"""A round that breaks inside, wherever it is: its requests fail, and whoever comes next gets what it gets alone."""

import pytest

import headlong
from headlong.backends.torch.round import Rounds
from tests import tiny

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [*range(40, 60)]]
STAGES = ("_place_given", "_place_masks", "_look_up", "_run_target", "_commit", "_count", "_hand_on", "_draft")


class Broken(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("model"), with_tokenizer=True)


def texts(engine):
    return [output.tokens for output in engine.generate(PROMPTS, max_tokens=12, ignore_eos=True, depth=2)]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_comes_after_a_broken_round_is_as_if_there_had_been_none(folder, monkeypatch, stage, after):
    with headlong.load(folder, rows=4, device="cpu") as engine:
        expected = texts(engine)
    work, calls = getattr(Rounds, stage), []

    def breaking(self, *given):
        calls.append(stage)
        if len(calls) == 2 and not after:
            raise Broken(stage)
        done = work(self, *given)
        if len(calls) == 2:
            raise Broken(stage)
        return done

    monkeypatch.setattr(Rounds, stage, breaking)
    with headlong.load(folder, rows=4, device="cpu") as engine:
        broken = engine.generate(PROMPTS, max_tokens=12, ignore_eos=True, depth=2)
        failed = [output for output in broken if output.finish_reason == "fault"]
        assert failed
        assert all(f"Broken: {stage}" in output.error for output in failed)
        assert all(output.tokens == whole[: len(output.tokens)] for output, whole in zip(broken, expected, strict=True))
        assert texts(engine) == expected
        engine._loop.scheduler.check()
