"""Schemathesis asks all that our own `/openapi.json` allows, and much that it does not; and real answers fit it."""

from __future__ import annotations

import subprocess
import sys

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.conftest import Live
from tests.server.test_refusals import CHAT, TEXT

ROUTES = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/health": "GET",
    "/ready": "GET",
    "/metrics": "GET",
}


@pytest.fixture(scope="module")
def described(served: Live):
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def test_every_route_is_described(described) -> None:
    assert {operation.ok().label for operation in described.get_all_operations()} == {
        f"{method} {path}" for path, method in ROUTES.items()
    }


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("path", ROUTES)
def test_every_answer_is_a_declared_one(described, path, mode) -> None:
    """Statuses, types and bodies are the document's, nothing that it forbids is accepted, and nothing breaks.

    Not all that it allows is accepted: how fields hang together (`top_logprobs` goes with `logprobs`) is not in it.
    """
    operation = described[path][ROUTES[path]]

    @settings(
        max_examples=25 if ROUTES[path] == "POST" else 3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    if ROUTES[path] == "POST" or mode is GenerationMode.POSITIVE:  # else there is nothing to be wrong
        ask()


@pytest.mark.slow
def test_schemathesis_runs_clean(served: Live, tmp_path) -> None:
    """The command as its users run it, with every phase."""
    words = ["run", f"{served.url}/openapi.json", "--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    words += ["--max-examples", "100", "--seed", "1", "--no-color"]
    ran = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *words], capture_output=True, text=True, timeout=1200, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "9 selected / 9 total" in ran.stdout
    served.settle()


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_real_answers_fit_the_document(served: Live, path, body) -> None:
    with served.http() as http:
        document = http.get("/openapi.json").json()
        said = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        for more in ({}, {"n": 2, "seed": 3}, {"speculation": {"enabled": False}}):
            jsonschema_rs.validate(said, http.post(path, json=body | more).json())
