"""What a server tells of itself: metrics, and the lines of its log."""

import logging
import re

from headlong.server.metrics import Histogram, Page
from headlong.server.pulse import Pulse
from tests.server.test_completions import ASK, CHAT

SAMPLE = re.compile(r'headlong:(\w+)\{model_name="nano"(?:,(\w+)="((?:[^"\\]|\\.)*)")?\} (\S+)')
NAMED = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "time_to_first_token_seconds_bucket",
    "time_per_output_token_seconds_bucket",
    "round_seconds_total",
    "spec_decode_windows_total",
    "spec_decode_undrafted_requests_total",
)


def read(server):
    """Every sample by its name and label; a series that is declared twice or not at all fails."""
    lines = server.get("/metrics").text.splitlines()
    declared = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(declared)) == len(declared)
    samples = {}
    for line in lines:
        if line.startswith("#"):
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name, _, label, value = found.groups()
        base = re.sub("_(bucket|sum|count)$", "", name)
        assert {f"headlong:{name}", f"headlong:{base}"} & set(declared), line
        samples[name, label] = float(value)
    return samples


def test_metrics_count_what_was_answered(server):
    server.post(CHAT, {"messages": ASK, "max_tokens": 5, "speculative": {"kind": "none"}})
    before = read(server)
    body = {"messages": ASK, "max_tokens": 40, "speculative": {"kind": "mtp", "depth": 3}}
    spent = server.post(CHAT, body).json()["speculative"]
    after = read(server)
    assert set(NAMED) <= {name for name, _ in after}

    def grown(name, label=None):
        return after[name, label] - before.get((name, label), 0)

    assert grown("spec_decode_num_draft_tokens_total") == spent["drafted"]
    assert grown("spec_decode_num_accepted_tokens_total") == spent["accepted"]
    for place, accepted in enumerate(spent["accepted_by_position"]):
        assert grown("spec_decode_num_accepted_tokens_per_pos_total", str(place)) == accepted
    assert grown("time_to_first_token_seconds_count") == grown("time_per_output_token_seconds_count") == 1
    assert grown("time_to_first_token_seconds_bucket", "+Inf") == 1
    assert grown("round_seconds_total", "verify") > 0
    assert grown("spec_decode_windows_total", "3") > 0
    assert after["spec_decode_undrafted_requests_total", "the request asked for plain decoding"] >= 1
    assert after["http_responses_total", "200"] > before["http_responses_total", "200"]


def test_buckets_hold_what_is_at_most_their_bound():
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(seconds)
    lines = [line for line in Page('a"b').histogram("x", "Some.", histogram) if "bucket" in line]
    assert [line.rpartition(" ")[2] for line in lines] == ["2", "3", "4"]
    assert lines[0].startswith('headlong:x_bucket{model_name="a\\"b",le="1"}')


def test_a_line_tells_how_it_goes(server):
    pulse = Pulse(server.engine)
    assert pulse.line() == ""
    server.post(CHAT, {"messages": ASK, "max_tokens": 40, "speculative": {"kind": "mtp", "depth": 2}})
    assert re.fullmatch(
        r"0 running, 0 waiting, \d+\.\d tok/s, \d\.\d\d tokens a round, accepted by position: \d+% \d+%", pulse.line()
    )
    assert pulse.line() == ""


def test_every_request_has_a_line(server, caplog):
    with caplog.at_level(logging.INFO, "headlong.server.access"):
        server.post(CHAT, {"messages": ASK, "max_tokens": 8, "user": "ann"})
        server.post(CHAT, {"messages": ASK, "colour": 1})
        server.get("/no%0Awhere")
    first, second, third = caplog.messages
    assert re.match(r"127\.0\.0\.1 POST /v1/chat/completions 200 \d+\.\d+ s, \d+ prompt tokens, first after", first)
    assert first.endswith(", length, user 'ann'")
    assert second.endswith(", colour is not supported by this server; leave it out.")
    assert " GET /no%0Awhere 404 " in third
