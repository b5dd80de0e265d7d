"""Counters, gauges and histograms for Prometheus, in the names that its readers know from other servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.llm import LLM
from outrider.record import Record
from outrider.request import Request
from outrider.server.goodput import Goodput

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SIZES = (1, 8, 32, 128, 512, 2048, 8192, 32768)


class Metrics:
    """One server's figures, in a registry of its own; rates are left to whoever divides the counters.

    Args:
        model: the served name, a label of all. drafter: its name, a label of what drafting counts.
        goodput: judges samples as they end.
    """

    def __init__(self, model: str, drafter: str, goodput: Goodput) -> None:
        self.goodput = goodput
        self.registry = CollectorRegistry()
        self._model = model
        self._drafter = drafter

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outrider_{name}", text, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"outrider_{name}", text, buckets=buckets, registry=self.registry)

        info = Gauge("outrider_build_info", "What is served.", ("model", "drafter"), registry=self.registry)
        info.labels(model, drafter).set(1)
        self.requests = counter("http_requests", "Answers by route and status.", "route", "status")
        self.refused = counter("requests_refused", "Requests that never ran, by reason.", "reason")
        for reason in ("queue_full", "over_share"):
            self.refused.labels(reason)  # 0, not unknown, until one is
        self.ended = counter("request_success", "Samples that ended, by reason.", "finished_reason")
        self.good = counter("request_good", "Samples whose tokens came in time.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of samples that ended.")
        self.cached_tokens = counter("prefix_cache_hits", "Prompt tokens whose keys were there already.")
        self.generation_tokens = counter("generation_tokens", "Tokens delivered.")
        self.preemptions = gauge("num_preemptions", "Requests that gave their slots back since the start.")
        self.running = gauge("num_requests_running", "Samples that hold slots.")
        self.waiting = gauge("num_requests_waiting", "Samples that wait for slots.")
        self.usage = gauge("kv_cache_usage_perc", "Share of the key-value blocks that are held, 0 to 1.")
        self.passes = counter("passes", "Passes of the target.")
        self.rows = counter("pass_rows", "Rows of all passes, by kind.", "kind")
        self.seconds = counter("pass_seconds", "Seconds of all passes, by part.", "part")
        self.drafts = counter("spec_decode_num_drafts", "Guesses asked for that held a token.", "drafter")
        self.drafted = counter("spec_decode_num_draft_tokens", "Tokens guessed.", "drafter")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Guessed tokens delivered.", "drafter")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Guessed tokens delivered, by place.", "drafter", "position"
        )
        self.cycles = counter("spec_decode_num_cycles", "Decode passes of requests.", "drafter")
        self.spent = counter("spec_decode_seconds", "Seconds of all decode passes of requests.", "drafter")
        self.plainly = counter(
            "spec_decode_plain_seconds", "What their tokens would have taken plainly, by measured prices.", "drafter"
        )
        self.speed_up = Gauge(
            "outrider_spec_decode_speed_up",
            "The latter by the former over the last passes, and its bounds (95 %).",
            ("bound",),
            registry=self.registry,
        )
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN)
        self.between = histogram(
            "inter_token_latency_seconds", "Between two tokens of a sample; 0 within a burst.", BETWEEN_TOKENS
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end of a sample.", WHOLE)
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a sample.", SIZES)
        self.output_size = histogram("request_generation_tokens", "Completion tokens of a sample.", SIZES)

    def memory(self, plan: Mapping[str, Any]) -> None:
        """Tell what memory was planned for, in bytes."""
        told = Gauge("outrider_memory_bytes", "Memory as planned.", ("purpose",), registry=self.registry)
        for purpose in ("target", "drafter", "target_stack", "drafter_stack"):
            told.labels(purpose).set(plan[purpose])

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def delivered(self, count: int, first: int, seconds: float) -> None:
        """`count` tokens, the first of which was a sample's token `first`, `seconds` after what came before."""
        self.generation_tokens.inc(count)
        (self.between if first else self.first_token).observe(seconds)
        for _ in range(count - 1):
            self.between.observe(0.0)

    def finished(self, reason: str, request: Request, seconds: float | None = None, first: float = 0.0) -> None:
        """A sample ended after so many seconds, its first token came after `first`; one given up has no latency."""
        self.ended.labels(reason).inc()
        self.prompt_tokens.inc(len(request.prompt))
        self.cached_tokens.inc(request.num_cached or 0)
        self.prompt_size.observe(len(request.prompt))
        self.output_size.observe(len(request.output))
        if seconds is not None:
            self.whole.observe(seconds)
            self.good.inc(self.goodput.judge(first, seconds, len(request.output)))

    def cycle(self, record: Record, llm: LLM) -> None:
        """Count a pass."""
        self.passes.inc()
        drafted = sum(cycle.drafted for cycle in record.cycles)
        decoding = len(record.cycles)
        for kind, rows in (("prefill", record.prefill_rows), ("guess", drafted), ("decode", decoding)):
            self.rows.labels(kind).inc(rows)
        known = record.seconds_draft + record.seconds_verify + record.seconds_sample
        for part, seconds in (
            ("draft", record.seconds_draft),
            ("verify", record.seconds_verify),
            ("sample", record.seconds_sample),
            ("other", max(0.0, record.seconds_total - known)),
        ):
            self.seconds.labels(part).inc(seconds)
        accepted = sum(cycle.delivered - 1 for cycle in record.cycles)
        self.cycles.labels(self._drafter).inc(decoding)
        self.drafts.labels(self._drafter).inc(sum(cycle.drafted > 0 for cycle in record.cycles))
        self.drafted.labels(self._drafter).inc(drafted)
        self.accepted.labels(self._drafter).inc(accepted)
        if record.saving is not None:
            self.spent.labels(self._drafter).inc(record.saving.spent)
            self.plainly.labels(self._drafter).inc(record.saving.plain)
        for position in range(max((cycle.delivered - 1 for cycle in record.cycles), default=0)):
            count = sum(cycle.delivered - 1 > position for cycle in record.cycles)
            self.accepted_at.labels(self._drafter, str(position)).inc(count)
        self.gauge(llm)

    def gauge(self, llm: LLM) -> None:
        """Read the scheduler's books; to be called by the engine's thread."""
        scheduler = llm.engine.scheduler
        self.running.set(len(scheduler.running))
        self.waiting.set(len(scheduler.waiting))
        self.preemptions.set(scheduler.num_preemptions)
        pool = scheduler.ledger.pool
        self.usage.set(pool.num_held / max(1, pool.num_blocks - 1))
        economy = llm.engine.economy
        for bound, value in ((economy.recent.to_json() if economy else None) or {}).items():
            self.speed_up.labels(bound).set(value)
