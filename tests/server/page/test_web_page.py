"""The page in a real browser, before the real server and its default model."""

import re
import time

import pytest

from tests.server.page.visitor import FIGURES, PHONE, PROMPT, VERDICT

LONG = "Write a function that merges two sorted lists."
SEEDED = {"temperature": 0.8, "seed": 5}


def asked(server, prompt=PROMPT, **options):
    """What the API answers, unstreamed."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "nano", "messages": messages, "max_tokens": 512, "temperature": 0, **options}
    return server.post("/v1/chat/completions", body).json()


def set_range(visitor, name, value):
    visitor.page.eval_on_selector(f"#{name}", f"field => {{ field.value = {value}; }}")


def test_a_chat_streams_and_marks_its_tokens(visit, server):
    visitor = visit(server.url)
    said = visitor.chat()
    answer = asked(server)
    assert said == answer["choices"][0]["message"]["content"]
    marks = visitor.tokens(".turn.model")
    assert "".join(text for text, _ in marks) == said
    assert {"p0", "p1"} <= {kind for _, kind in marks}
    figures = visitor.page.inner_text(FIGURES)
    assert figures.startswith(f"{answer['usage']['completion_tokens']} tokens · ")
    assert "mtp to depth" in figures
    assert float(visitor.page.inner_text("#speed").replace(",", "")) > 0
    assert float(visitor.page.inner_text("#length")) > 1
    assert "nano" in visitor.page.inner_text("#model")


def test_settings_change_the_answer(visit, server):
    visitor = visit(server.url)
    set_range(visitor, "temperature", SEEDED["temperature"])
    visitor.page.fill("#seed", str(SEEDED["seed"]))
    visitor.page.fill("#max_tokens", "20")
    visitor.page.select_option("#kind", "none")
    said = visitor.chat()
    answer = asked(server, max_tokens=20, **SEEDED)
    assert said == answer["choices"][0]["message"]["content"]
    assert {kind for _, kind in visitor.tokens(".turn.model")} == {"p0"}
    figures = visitor.page.inner_text(FIGURES)
    assert "plain: the request asked for plain decoding" in figures
    assert figures.endswith("cut at max tokens")


def test_a_conversation_goes_on(visit, server):
    visitor = visit(server.url)
    first = visitor.chat()
    second = visitor.chat("Rename it.", turns=2)
    messages = [("user", PROMPT), ("assistant", first), ("user", "Rename it.")]
    answer = asked(server, messages=[{"role": role, "content": text} for role, text in messages])
    assert second == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_race_ends_with_identical_text_and_its_speed(visit, server, temperature):
    visitor = visit(server.url)
    set_range(visitor, "temperature", temperature)
    verdict = visitor.race(LONG)
    assert re.match(r"((MTP|Plain) \d+(\.\d+)?× as fast|Equally fast), identical text\n", verdict)
    drafted, plain = visitor.tokens("#drafted-lane"), visitor.tokens("#plain-lane")
    assert "".join(text for text, _ in drafted) == "".join(text for text, _ in plain)
    assert "p1" in {kind for _, kind in drafted}
    assert {kind for _, kind in plain} == {"p0"}
    assert visitor.page.locator("#drafted-bar .p1").count() == 1


def test_a_refusal_is_a_sentence(visit, server):
    visitor = visit(server.url)
    visitor.page.fill("#max_tokens", "99999")
    visitor.send(PROMPT)
    visitor.page.wait_for_selector(".turn .error")
    said = visitor.page.inner_text(".turn .error")
    assert re.match(r"The prompt has \d+ tokens and max_tokens is 99999, .*\.$", said)
    visitor.page.fill("#max_tokens", "8")
    visitor.page.click(".turn button")
    visitor.page.wait_for_selector(FIGURES)
    assert visitor.page.locator(".error").count() == 0


def test_a_stopped_answer_lets_go_of_its_row(visit, server):
    visitor = visit(server.url)
    visitor.page.fill("#max_tokens", "1900")
    visitor.page.click("#tab-race")
    visitor.send("Explain what a context manager does.")
    visitor.page.wait_for_selector("#plain-lane .token")
    visitor.page.keyboard.press("Escape")
    visitor.page.wait_for_selector(VERDICT)
    assert visitor.page.inner_text("#verdict").startswith("Stopped before the end")
    for _ in range(200):
        if not server.service.gate.inside:
            break
        time.sleep(0.05)
    assert not server.service.gate.inside


def test_a_key_is_asked_for_once(visit, serve):
    visitor = visit(serve(api_key="secret").url)
    page = visitor.page
    page.wait_for_selector("#key-form", state="visible")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.locator("#key-why", has_text="did not accept").wait_for()
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    page.wait_for_selector("#key-form", state="hidden")
    assert "identical text" in visitor.race()
    page.reload()
    page.locator("#model", has_text="nano").wait_for()
    assert page.is_hidden("#key-form")


def test_a_phone_in_the_dark(visit, server):
    visitor = visit(server.url, viewport=PHONE, has_touch=True, color_scheme="dark")
    visitor.chat(LONG)
    assert visitor.fits()
    assert "identical text" in visitor.race(LONG)
    assert visitor.fits()
    paper = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", paper))) < 64


def test_the_browser_is_told_to_load_nothing_from_elsewhere(server):
    headers = server.get("/").headers
    assert "default-src 'self'" in headers["content-security-policy"]
    for name in ("page.js", "page.css", "icon.svg"):
        assert server.get(f"/page/{name}").status_code == 200
