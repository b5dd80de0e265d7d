"""The figures of many servers on one page."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outrider.deploy import figures
from outrider.deploy.figures import Pool, apart


def page(count: int, running: int, usage: float, seconds: float) -> bytes:
    registry = CollectorRegistry()
    Counter("outrider_generation_tokens", "Tokens.", ("kind",), registry=registry).labels('a "b"\\').inc(count)
    Gauge("outrider_num_requests_running", "Samples.", registry=registry).set(running)
    Gauge("outrider_kv_cache_usage_perc", "Share.", registry=registry).set(usage)
    Histogram("outrider_whole_seconds", "Seconds.", buckets=(1.0, 2.0), registry=registry).observe(seconds)
    return generate_latest(registry)


def read(text: bytes) -> dict[tuple[str, ...], float]:
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_sums_and_shares():
    found = read(Pool().pooled({"one": page(3, 2, 0.5, 0.1), "two": page(4, 1, 0.25, 1.5)}))
    assert found["outrider_generation_tokens_total", 'a "b"\\'] == 7
    assert found["outrider_num_requests_running",] == 3
    assert found["outrider_kv_cache_usage_perc", "one"] == 0.5
    assert found["outrider_kv_cache_usage_perc", "two"] == 0.25
    assert found["outrider_whole_seconds_count",] == found["outrider_whole_seconds_bucket", "+Inf"] == 2
    assert found["outrider_whole_seconds_bucket", "1.0"] == 1
    assert found["outrider_whole_seconds_sum",] == 1.6


def test_counters_never_fall(monkeypatch):
    """Neither when a server is silent for once, nor when it has gone for good, however many did."""
    monkeypatch.setattr(figures, "KEPT", 2)
    pool = Pool()
    seen = []
    for told in (
        {"a": page(5, 1, 0.1, 0.1), "b": page(7, 1, 0.1, 0.1)},
        {"b": page(8, 1, 0.1, 0.1)},
        {"a": page(6, 1, 0.1, 0.1), "b": page(9, 1, 0.1, 0.1)},
        {"c": page(1, 4, 0.1, 0.1)},
        {"d": page(1, 4, 0.1, 0.1)},
        {"e": page(2, 4, 0.1, 0.1), "d": page(2, 0, 0.1, 0.1)},
        {},
    ):
        found = read(pool.pooled(told))
        seen.append(found["outrider_generation_tokens_total", 'a "b"\\'])
    assert seen == [12, 13, 15, 16, 17, 20, 20]


def test_server_by_server():
    found = read(apart({"one": page(3, 2, 0.5, 0.1), "two": page(4, 1, 0.25, 1.5)}))
    assert found["outrider_generation_tokens_total", 'a "b"\\', "one"] == 3
    assert found["outrider_num_requests_running", "two"] == 1
    assert found["outrider_whole_seconds_bucket", "1.0", "two"] == 0
