"""The page against a stand-in: every mark, odd errors, texts that differ, and what it sends."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.stand_in import CUT, Refused, StandIn, end, tokens
from tests.server.page.visitor import DESKTOP, FIGURES, PHONE, VERDICT

CONTRAST = Path(__file__).with_name("contrast.js").read_text("utf-8")


def short_answer(body: dict[str, Any]) -> list[Any]:
    return [tokens(("Hel", 0)), tokens(("lo", 1), (" there", 2), (".", 0), finish="stop"), end(4, 10.0, (1, 1))]


def test_tokens_are_marked_by_origin(visit, stand_in):
    stand_in.reply = short_answer
    visitor = visit(stand_in.address)
    assert visitor.chat("Hi") == "Hello there."
    assert visitor.tokens(".turn.model") == [("Hel", "p0"), ("lo", "p1"), (" there", "p2"), (".", "p0")]
    assert visitor.page.inner_text(".figures").startswith("4 tokens · 400 a second · 2.00 a round")
    assert visitor.page.inner_text("#speed") == "400"
    shares = visitor.page.eval_on_selector_all("#origins .share", "found => found.map(one => one.textContent)")
    assert shares == ["50%", "50%"] + ["0%"] * 6


def test_marks_differ_in_hue_and_in_line(visit, stand_in):
    page = visit(stand_in.address).page
    page.locator("#origins li").nth(8).wait_for()
    look = """found => found.map(one => getComputedStyle(one)).map(
        style => [style.textDecorationColor, style.textDecorationStyle + style.textDecorationThickness])"""
    marks = page.eval_on_selector_all("#origins .token:not(.p0)", look)
    assert len({hue for hue, _ in marks}) == len({line for _, line in marks}) == 8


def test_the_next_turn_brings_the_past(visit, stand_in):
    stand_in.reply = short_answer
    visitor = visit(stand_in.address)
    visitor.page.fill("#system", "Be brief.")
    visitor.chat("One")
    visitor.chat("Two", turns=2)
    said = [(message["role"], message["content"]) for message in stand_in.bodies[-1]["messages"]]
    assert said == [("system", "Be brief."), ("user", "One"), ("assistant", "Hello there."), ("user", "Two")]
    visitor.page.click("#new-chat")
    visitor.chat("Three")
    assert [message["content"] for message in stand_in.bodies[-1]["messages"]] == ["Be brief.", "Three"]


def test_settings_reach_the_body(visit, stand_in):
    stand_in.reply = short_answer
    visitor = visit(stand_in.address)
    page = visitor.page
    for name, value in {"temperature": "0.8", "top_p": "0.9", "min_p": "0.05"}.items():
        page.eval_on_selector(f"#{name}", f"field => {{ field.value = {value}; }}")
    for name, value in {"top_k": "40", "max_tokens": "33", "seed": "7"}.items():
        page.fill(f"#{name}", value)
    page.select_option("#kind", "mtp")
    page.select_option("#depth", "3")
    visitor.chat("Hi")
    body = stand_in.bodies[-1]
    asked = {name: body[name] for name in ("temperature", "top_p", "min_p", "top_k", "max_tokens", "seed")}
    assert asked == {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "top_k": 40, "max_tokens": 33, "seed": 7}
    assert body["speculative"] == {"kind": "mtp", "depth": 3}
    page.reload()
    assert (page.input_value("#seed"), page.input_value("#depth")) == ("7", "3")  # kept for the next visit


def test_markup_of_a_model_stays_text(visit, stand_in):
    markup = "<img src=x onerror=\"document.title='run'\"><b>bold</b>"
    stand_in.reply = lambda body: [tokens((markup, 0), finish="stop"), end(1, 1.0)]
    visitor = visit(stand_in.address)
    assert visitor.chat(markup) == markup
    assert visitor.page.inner_text(".turn.user .said") == markup
    assert visitor.page.locator("#log img, #log b").count() == 0
    assert visitor.page.title() == "Headlong"


def test_reasoning_is_folded_apart(visit, stand_in):
    thought = tokens(("I ", 0), ("wonder", 1), part="reasoning_content")
    stand_in.reply = lambda body: [thought, tokens(("Yes.", 0), finish="stop"), end(3, 5.0, (1,))]
    visitor = visit(stand_in.address)
    visitor.chat("Think")
    assert not visitor.page.is_visible(".thoughts .text")
    visitor.page.click(".thoughts summary")
    assert visitor.page.inner_text(".thoughts .text") == "I wonder"
    assert visitor.page.inner_text(".turn.model > .text") == "Yes."
    visitor.chat("Again", turns=2)
    assert stand_in.bodies[-1]["messages"][1]["content"] == "Yes."


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (
            Refused(400, json.dumps({"error": {"message": "top_k is -1; it must be at least 0."}})),
            "top_k is -1; it must be at least 0.",
        ),
        (Refused(400, json.dumps({"error": {"message": {"why": "odd"}}})), "The server could not answer (status 400)."),
        (Refused(502, "<html><h1>Bad gateway</h1></html>"), "The server could not answer (status 502)."),
        (Refused(429, "{}", {"Retry-After": "3"}), "The server is busy. Try again in 3 s."),
        ([tokens(("Wo", 0)), {"error": {"message": "the row was lost"}}], "The row was lost."),
        ([tokens(("Wo", 0)), "{not json"], "The server sent something that this page cannot read."),
        ([tokens(("Wo", 0)), CUT], "The connection closed before the answer was complete."),
    ],
)
def test_errors_are_sentences(visit, stand_in, reply, sentence):
    stand_in.reply = lambda body: reply
    visitor = visit(stand_in.address)
    visitor.send("Hi")
    visitor.page.wait_for_selector(".turn .error")
    assert visitor.page.inner_text(".turn .error") == sentence
    stand_in.reply = short_answer
    visitor.page.click(".turn button")
    visitor.page.wait_for_selector(FIGURES)
    assert [message["content"] for message in stand_in.bodies[-1]["messages"]] == ["Hi"]
    assert visitor.page.locator(".error").count() == 0


def test_a_server_that_is_gone_is_a_sentence(visit):
    gone = StandIn()
    visitor = visit(gone.address)
    visitor.page.locator("#model", has_text="stand-in").wait_for()
    gone.shutdown()
    gone.server_close()
    visitor.send("Hi")
    visitor.page.wait_for_selector(".turn .error")
    assert visitor.page.inner_text(".turn .error") == "The server did not answer. Is it still running?"


def endless(body: dict[str, Any]) -> Iterator[Any]:
    for number in range(2000):
        yield tokens((f"{number} ", 0))
        yield 0.01


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_hangs_up(visit, stand_in, how):
    stand_in.reply = endless
    visitor = visit(stand_in.address)
    visitor.send("Go on")
    visitor.page.wait_for_selector(".turn.model .token")
    visitor.page.click("#stop") if how == "button" else visitor.page.keyboard.press("Escape")
    visitor.page.wait_for_selector(FIGURES)
    assert visitor.page.inner_text(".figures").endswith("stopped")
    assert visitor.page.is_visible("#send")
    for _ in range(100):
        if stand_in.hung_up:
            break
        visitor.page.wait_for_timeout(50)
    assert stand_in.hung_up


def lanes(plain: str) -> Any:
    """An answer with drafts, and another text, twice as slow, without."""

    def reply(body: dict[str, Any]) -> list[Any]:
        if body["speculative"]["kind"] == "none":
            return [tokens((plain, 0), finish="stop"), end(4, 20.0)]
        return short_answer(body)

    return reply


def test_a_race_of_different_texts_says_where(visit, stand_in):
    stand_in.reply = lanes("Hello where.")
    verdict = visit(stand_in.address).race()
    assert "MTP 2.00× as fast, the texts differ" in verdict
    assert "The texts part at character 7, in line 1:" in verdict
    assert "there." in verdict
    assert "where." in verdict


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (lanes("Hello there."), "MTP 2.00× as fast, identical text"),
        (lanes("Hello there"), "The texts part at character 12, in line 1:"),
        (lambda body: Refused(429, "{}"), "MTP could not run: The server is busy. Try again in a moment."),
        (
            lambda body: [tokens(("Same.", 0), finish="stop"), end(1, 10.0)],
            "Nothing was drafted: the request asked for plain decoding.",
        ),
    ],
)
def test_a_race_ends_with_what_happened(visit, stand_in, reply, said):
    stand_in.reply = reply
    assert said in visit(stand_in.address).race()


def test_a_stopped_race_claims_nothing(visit, stand_in):
    stand_in.reply = endless
    visitor = visit(stand_in.address)
    visitor.page.click("#tab-race")
    visitor.send("Go on")
    visitor.page.wait_for_selector("#plain-lane .token")
    visitor.page.keyboard.press("Escape")
    visitor.page.wait_for_selector(VERDICT)
    verdict = visitor.page.inner_text("#verdict")
    assert "Stopped before the end" in verdict
    assert "As far as both had come, the texts agree." in verdict


def test_both_lanes_get_the_same_but_for_drafting(visit, stand_in):
    stand_in.reply = short_answer
    visitor = visit(stand_in.address)
    visitor.page.eval_on_selector("#temperature", "field => { field.value = 0.7; }")
    visitor.race()
    drafted, plain = sorted(stand_in.bodies, key=lambda body: body["speculative"]["kind"])
    assert drafted.pop("speculative") == {"kind": "mtp", "depth": 3}
    assert plain.pop("speculative") == {"kind": "none"}
    assert drafted == plain
    assert isinstance(plain["seed"], int)
    assert f"seed {plain['seed']}" in visitor.page.inner_text("#race-note")
    assert "share this machine" in visitor.page.inner_text("#race-note")


@pytest.mark.parametrize(("kind", "depth", "asked"), [("auto", "auto", 3), ("ngram", "auto", 8), ("auto", "5", 5)])
def test_a_race_asks_for_a_depth(visit, stand_in, kind, depth, asked):
    """Beside a plain lane the server would hardly draft by itself."""
    stand_in.reply = short_answer
    visitor = visit(stand_in.address)
    for field, value in (("kind", kind), ("depth", depth)):
        visitor.page.eval_on_selector(f"#{field}", "(field, value) => { field.value = value; }", value)
    visitor.race()
    (drafted,) = [body["speculative"] for body in stand_in.bodies if body["speculative"]["kind"] != "none"]
    assert drafted["depth"] == asked


def test_the_page_works_by_keyboard(visit, stand_in):
    stand_in.reply = short_answer
    page = visit(stand_in.address).page
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(FIGURES)
    assert stand_in.bodies[-1]["messages"][-1]["content"] == "One\ntwo"
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#race")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id"))
        shown = "document.activeElement === document.body || getComputedStyle(document.activeElement).outlineWidth"
        assert page.evaluate(shown) in (True, "2px")
    wanted = "message send tab-race temperature top_p min_p top_k max_tokens seed depth kind system colours"
    assert set(wanted.split()) <= seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_texts_stand_out(visit, stand_in, scheme, size):
    marked = [tokens(*((f"word{place} ", place) for place in range(9)), finish="stop"), end(9, 10.0, (1,) * 8)]
    stand_in.reply = lambda body: marked
    visitor = visit(stand_in.address, color_scheme=scheme, viewport=size)
    visitor.send("Hi")
    visitor.page.wait_for_selector(FIGURES)
    assert visitor.page.evaluate(CONTRAST) >= 4.5
    visitor.race()
    assert visitor.page.evaluate(CONTRAST) >= 4.5
    paper = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in re.findall(r"\d+", paper)) / 3
    assert (brightness < 64) == (scheme == "dark")


def test_a_phone_shows_all_of_it(visit, stand_in):
    long = [tokens(("x" * 200 + " ", 0), ("def f():\n    return " + "y" * 300, 1), finish="stop"), end(2, 10.0, (1,))]
    stand_in.reply = lambda body: long
    visitor = visit(stand_in.address, viewport=PHONE, has_touch=True)
    page = visitor.page
    assert visitor.fits()
    visitor.chat("z" * 300)
    assert visitor.fits()
    visitor.race("z" * 300)
    assert visitor.fits()
    page.click("#open-settings")
    assert page.is_visible("#temperature")
    assert visitor.fits()
    page.keyboard.press("Escape")
    assert page.is_hidden("#temperature")
    page.click("#tab-chat")
    box = page.locator("#send").bounding_box()
    assert box["height"] >= 44
    assert box["y"] + box["height"] <= PHONE["height"]
