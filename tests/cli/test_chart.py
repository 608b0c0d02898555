"""Charts: where things stand, and what is drawn."""

import re
from xml.etree import ElementTree

import pytest

from headlong.cli.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axes, Line, Point, draw

SVG = "http://www.w3.org/2000/svg"
AXES = Axes("a <title>", "depth", [0, 1, 2], top=1.7, mark=1.0)


def parts(svg, kind):
    return [node for node in ElementTree.fromstring(svg).iter() if node.tag.endswith(kind)]


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        (1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.7, [0.0, 0.5, 1.0, 1.5, 2.0]),
        (4.6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        (70.0, [0.0, 70.0]),
    ],
)
def test_ticks_are_round_and_reach_the_top(top, ticks):
    assert Axes("", "", [0, 1], top).ticks == pytest.approx(ticks)


def test_the_corners():
    assert (AXES.x(0), AXES.x(2)) == (LEFT, WIDTH - RIGHT)
    assert (AXES.y(0.0), AXES.y(2.0)) == (HEIGHT - BOTTOM, TOP)
    assert Axes("", "", [3], 1.0).x(3) == (LEFT + WIDTH - RIGHT) / 2


def test_lines_stand_at_their_values():
    svg = draw(AXES, [Line("measured", "--measured", [Point(0, 1.0), Point(2, 1.6)])])
    [line] = parts(svg, "polyline")
    wanted = [AXES.x(0), AXES.y(1.0), AXES.x(2), AXES.y(1.6)]
    assert [float(number) for number in re.split("[ ,]", line.get("points"))] == pytest.approx(wanted, abs=0.06)
    assert line.get("stroke") == "var(--measured)"
    assert [node.text for node in parts(svg, "title")] == ["measured, depth 0: 1.00", "measured, depth 2: 1.60"]


def test_a_band_goes_out_along_the_top_and_back_along_the_bottom():
    svg = draw(AXES, [Line("m", "--m", [Point(0, 1.0, 0.5, 1.5), Point(1, 1.0, 0.6, 1.2)])])
    [band] = parts(svg, "polygon")
    got = [tuple(map(float, pair.split(","))) for pair in band.get("points").split()]
    corners = [(0, 1.5), (1, 1.2), (1, 0.6), (0, 0.5)]
    for place, (x, y) in zip(got, corners, strict=True):
        assert place == pytest.approx((AXES.x(x), AXES.y(y)), abs=0.06)


def test_without_a_spread_there_is_no_band():
    assert parts(draw(AXES, [Line("m", "--m", [Point(0, 1.0)])]), "polygon") == []


def test_dashes_and_marks():
    svg = draw(AXES, [Line("p", "--p", [Point(0, 1.0)], dashed=True)])
    assert parts(svg, "polyline")[0].get("stroke-dasharray")
    marks = [line for line in parts(svg, "line") if line.get("class") == "mark"]
    assert [float(line.get("y1")) for line in marks] == pytest.approx([AXES.y(1.0)], abs=0.06)


def test_shares_are_shown_as_percentages():
    svg = draw(Axes("kept", "position", [1, 2], 1.0, ".0%"), [Line("code", "--line-1", [Point(1, 0.756)])])
    assert [node.text for node in parts(svg, "title")] == ["code, position 1: 76%"]
    assert "100%" in [node.text for node in parts(svg, "text")]


def test_titles_are_escaped():
    assert "a &lt;title&gt;" in draw(AXES, [])
