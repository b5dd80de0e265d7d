"""This server under its own check, drafting in every cycle: nothing is broken, nothing refused."""

from __future__ import annotations

import asyncio

import pytest

from outrider.measure.endpoint.client import Endpoint
from outrider.measure.endpoint.examine import examine
from outrider.measure.endpoint.plan import Plan
from tests.server.conftest import live, open_tiny
from tests.server.tiny_chat import save_tiny_chat

PROMPTS = ["abc the abc the abc", "the the the"]


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_our_own_server_holds(tmp_path, acceptance) -> None:
    async def run(url):
        endpoint = Endpoint(url)
        try:
            return await examine(endpoint, PROMPTS, Plan(draws=48, draw_tokens=6, max_tokens=24))
        finally:
            await endpoint.close()

    llm = open_tiny(save_tiny_chat(tmp_path), acceptance=acceptance)
    with live(llm) as served:
        report = asyncio.run(run(served.url))
        served.settle()
    assert [f"{finding.name}: {finding.said}" for finding in report.broken] == []
    held = {finding.name for finding in report.findings if finding.status == "held"}
    assert held >= {
        "max_tokens",
        "stop",
        "usage",
        "stream",
        "seed",
        "n",
        "logprobs",
        "logit_bias",
        "greedy: in company",
    }
    assert report.counts()["refused"] == 0
