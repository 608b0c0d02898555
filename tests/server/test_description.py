"""Requests made up from the server's own description, fitting and not: none makes it break."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.errors import InvalidSchema

from headlong.server.api import ENDPOINTS
from headlong.server.openapi import description
from tests.server.conftest import running

EXAMPLES = 60  # for each endpoint, of each kind

schema = schemathesis.openapi.from_dict(description("nano"))


@pytest.fixture(scope="module")
def url(engine):
    """Answers end soon, whatever is asked for."""
    with running(engine, request_s=0.2) as server:
        assert server.get("/openapi.json").json() == schema.raw_schema
        yield server.url


KINDS = [(endpoint, mode) for endpoint in ENDPOINTS for mode in GenerationMode if endpoint.body or mode.is_positive]


@pytest.mark.parametrize(("endpoint", "mode"), KINDS, ids=lambda each: getattr(each, "path", None) or each.value)
def test_nothing_makes_it_break(url, endpoint, mode):
    made = schema[endpoint.described][endpoint.method].as_strategy(generation_mode=mode)

    @given(st.data())
    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def holds(data):
        try:
            case = data.draw(made)
        except InvalidSchema:  # it made up a body that cannot be
            reject()
        case.call_and_validate(base_url=url, checks=[not_a_server_error])

    holds()
