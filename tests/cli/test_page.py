"""The page of a bench: every number that was found, whole HTML, nothing from elsewhere."""

from html.parser import HTMLParser

import pytest

from headlong.cli import page
from headlong.cli.result import Result
from headlong.engine.bench import Case, Difference, Mode, Plan
from headlong.engine.costs import Costs
from headlong.engine.figures import Figures, Report, Section, Spread

VOID = {"meta", "br"}


def figures(depth, speedup, accepted=()):
    spread = Spread(speedup, speedup - 0.11, speedup + 0.13)
    predicted = speedup + 0.07 if depth else None
    return Figures(depth, 4, 100, 2.0, 50, Spread(300.0, 290.0, 310.0), spread, speedup, predicted, 2.0, accepted)


def made(**changes):
    costs = Costs(0.003, {2: 1.31}, {2: 0.42}, 0.2, 0.15)
    code = (figures(0, 1.0), figures(2, 1.82, (0.91, 0.73)))
    chat = (figures(0, 1.0), figures(2, 1.55, (0.81, 0.52)))
    both = (figures(0, 1.0), figures(2, 1.66, (0.86, 0.62)))
    section = Section(Mode(0.0), costs, both, {"code": code, "<b>chat": chat})
    report = Report((section,), {"code": 2, "<b>chat": 2}, 900.0, 8, ())
    facts = {"cpu": "Abacus", "cores": 2, "platform": "wood", "python": "3", "headlong": "0.1.0"}
    plan = Plan((Case("code", 1, (1,)),), (Mode(0.0),), (0, 2))
    values = {
        "model": "some/<model>",
        "device": "2 threads",
        "machine": facts,
        "plan": plan,
        "available": {"code": 2, "<b>chat": 9},
        "report": report,
        "no_draft_reason": "",
        "peak_memory": 2**29,
        "seconds": 61.0,
        "interrupted": False,
    }
    return Result(**values | changes)


class Balance(HTMLParser):
    """Every tag that opens is closed again, in order."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        """Opened and closed at once."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def html():
    return page.render(made())


def test_the_page_is_whole(html):
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    assert "some/&lt;model&gt;" in html
    assert "<b>" not in html


def test_nothing_is_fetched(html):
    for word in ("http:", "https:", "src=", "href=", "@import", "url(", "<script"):
        assert word not in html


def test_it_has_a_light_and_a_dark_look(html):
    assert "prefers-color-scheme: dark" in html


def test_it_has_the_numbers(html):
    for number in ("1.82", "1.71-1.95", "1.89", "1.55", "1.66", "91% 73%", "86% 62%", "1.31", "0.42", "0.15 (delta)"):
        assert number in html, number
    assert "code 2, &lt;b&gt;chat 2 of 9" in html
    assert "Prefill 900 tok/s; peak memory of the process 512 MiB; 61 s in all" in html
    assert "Fastest: greedy at depth 2, 1.66 times plain" in html
    assert "Same text: all 8 texts" in html


def test_each_set_has_a_chart_and_drafts_have_one(html):
    assert html.count("<svg") == 4
    for title in ("all: speed-up", "code: speed-up", "drafts kept by position, at depth 2"):
        assert f">{title}</text>" in html
    assert "<title>code, position 2: 73%</title>" in html
    assert "<title>predicted, depth 2: 1.73</title>" in html


def test_another_text_stands_out():
    report = made().report
    wrong = Difference("code 1", "greedy", 0, 2, 17)
    html = page.render(made(report=Report(report.sections, report.prompts, 900.0, 8, (wrong,))))
    assert '<p class="bad">NOT the same text: 1 of 8 texts' in html


def test_plain_decoding_alone_has_a_table_and_no_chart():
    section = Section(Mode(0.0), None, (figures(0, 1.0),), {"code": (figures(0, 1.0),)})
    report = Report((section,), {"code": 2}, 900.0, 2, ())
    html = page.render(made(report=report, no_draft_reason="no head was found", plan=Plan((), depths=(0,))))
    assert "Plain decoding alone: no head was found" in html
    assert "<svg" not in html
    assert "<td>300</td>" in html
