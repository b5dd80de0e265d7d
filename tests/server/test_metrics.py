"""What Prometheus is told adds up to what was served; and every request is one line of the log."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.server import metrics
from outrider.server.logs import JsonFormatter
from tests.server.conftest import live, open_tiny


@pytest.fixture(scope="module")
def own(folder):
    with live(open_tiny(folder)) as served:
        yield served


METRIC = re.compile(r"\boutrider_\w+")


def figures(http) -> dict[tuple[str, ...], float]:
    """Samples by name and labels."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_counters_are_the_sums_of_the_answers(own) -> None:
    """Fault 37."""
    body = {"prompt": "abc the abc the", "max_tokens": 60, "temperature": 0, "n": 2}
    with own.http() as http:
        usages = [http.post("/v1/completions", json={**body, "seed": seed}).json()["usage"] for seed in range(3)]
        with http.stream("POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 400}) as answer:
            next(answer.iter_lines())
        own.settle()
        found = figures(http)
    told = [usage["speculation"] for usage in usages]
    accepted, drafted = sum(t["accepted"] for t in told), sum(t["drafted"] for t in told)
    name = "outrider_spec_decode_num"
    # The stream that was left counts as far as it came.
    assert found[f"{name}_accepted_tokens_total", "ngram"] >= accepted > 0
    assert found[f"{name}_draft_tokens_total", "ngram"] >= drafted
    by_place = [value for key, value in found.items() if key[0] == f"{name}_accepted_tokens_per_pos_total"]
    assert sum(by_place) == found[f"{name}_accepted_tokens_total", "ngram"]
    assert by_place == sorted(by_place, reverse=True)
    assert found[f"{name}_cycles_total", "ngram"] >= sum(t["cycles"] for t in told)
    assert found["outrider_spec_decode_seconds_total", "ngram"] > 0
    assert found["outrider_spec_decode_plain_seconds_total", "ngram"] > 0
    assert all(0 <= t["speed_up"]["low"] <= t["speed_up"]["ratio"] <= t["speed_up"]["high"] for t in told)
    low, ratio, high = (found["outrider_spec_decode_speed_up", bound] for bound in ("low", "ratio", "high"))
    assert 0 <= low < ratio < high
    assert found["outrider_generation_tokens_total",] >= sum(u["completion_tokens"] for u in usages)
    assert found["outrider_request_success_total", "abort"] == 2
    ended = sum(value for key, value in found.items() if key[0] == "outrider_request_success_total")
    assert ended == 8 == found["outrider_request_prompt_tokens_count",]
    assert found["outrider_http_requests_total", "/v1/completions", "200"] == 4
    assert found["outrider_num_requests_running",] == found["outrider_num_requests_waiting",] == 0
    assert found["outrider_kv_cache_usage_perc",] == 0
    seconds = [value for key, value in found.items() if key[0] == "outrider_pass_seconds_total"]
    assert len(seconds) == 4
    assert min(seconds) >= 0
    assert found["outrider_time_to_first_token_seconds_count",] == 8
    tokens = found["outrider_inter_token_latency_seconds_count",] + 8
    assert tokens == found["outrider_generation_tokens_total",]


def test_each_request_is_one_line_with_its_id(own, caplog) -> None:
    caplog.set_level(logging.INFO, logger="outrider.access")
    with own.http(headers={"X-Request-Id": "r-7"}) as http:
        http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 5, "seed": 9, "user": "Bo"})
        http.post("/v1/completions", json={"prompt": "ab", "nonsense": 1})
    lines = [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "outrider.access"]
    done, refused = lines[-2:]
    assert done["request_id"] == refused["request_id"] == "r-7"
    assert (done["status"], refused["status"]) == (200, 400)
    assert (done["completion_tokens"], done["seed"], done["user"], done["stream"]) == (5, 9, "Bo", False)
    assert done["finish_reasons"] == ["length"]
    assert 0 < done["first_token_seconds"] <= done["seconds"]
    assert "completion_tokens" not in refused


def test_a_log_line_is_one_line(caplog) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("outrider.test").exception("it\nbroke")
    line = JsonFormatter().format(caplog.records[-1])
    assert "\n" not in line
    assert "two\nlines" in json.loads(line)["exception"]


def test_the_dashboard_asks_for_what_there_is(own) -> None:
    dashboard = json.loads((Path(metrics.__file__).parent / "dashboard.json").read_text())
    asked = {name for panel in dashboard["panels"] for t in panel["targets"] for name in METRIC.findall(t["expr"])}
    with own.http() as http:
        http.post("/v1/completions", json={"prompt": "abc the abc the", "max_tokens": 30, "temperature": 0})
        text = http.get("/metrics").text
    there = set(METRIC.findall(text))
    assert len(asked) > 15
    assert asked <= there
