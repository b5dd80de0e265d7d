"""Five hundred schemas drawn at random: each answer is JSON of its schema, and the one of plain decoding."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.server.conftest import live, open_tiny
from tests.server.tiny_chat import save_tiny_chat

CLIENTS = 16
DEPTH = 15
LETTERS = "abcdefgh é"


def schema(rng: random.Random, levels: int = 2) -> dict[str, Any]:
    """Finite ones, so that every text ends; arrays and objects may lie within each other."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "number", "pattern", "any_of"]
    kind = rng.choice(kinds + ["object", "array", "object", "array"] * (levels > 0) + ["object"] * 8 * (levels == 2))
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "number":
        return {"enum": [rng.randint(0, 99) / 4, -1.5, 1e9]}
    if kind == "enum":
        return {"enum": [rng.choice(["a b", "é", 'say "no"', 3, None, True]), "other"]}
    if kind == "const":
        return {"const": {"v": [rng.randint(0, 9), LETTERS]}}
    if kind == "pattern":
        return {"type": "string", "pattern": f"^[a-f]{{{rng.randint(1, 3)}}}-[0-9]{{2}}$"}
    if kind == "any_of":
        return {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
    if kind == "array":
        return {"type": "array", "items": schema(rng, levels - 1), "minItems": rng.randint(0, 1), "maxItems": 3}
    if kind == "object":
        names = [f"{rng.choice('abcé')}{place}" for place in range(rng.randint(1, 4))]
        properties = {name: schema(rng, levels - 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("temperature", "count"), [(0.0, 500), (1.0, 100)])
def test_every_answer_is_valid_and_the_plain_one(tmp_path, temperature, count) -> None:
    rng = random.Random(5)
    asked = [{"prompt": f"abc {number}", "schema": schema(rng), "seed": number} for number in range(count)]
    found: dict[tuple[int, bool], dict[str, Any]] = {}

    async def client(url: str, waiting: Any) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            for number, is_guessed in waiting:
                each = asked[number]
                body = {
                    "prompt": each["prompt"],
                    "seed": each["seed"],
                    "temperature": temperature,
                    "max_tokens": 2500,
                    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": each["schema"]}},
                    "speculation": {"enabled": is_guessed},
                }
                answer = await http.post("/v1/completions", json=body)
                assert answer.status_code == 200, (answer.text, each["schema"])
                found[number, is_guessed] = answer.json()

    async def all_of_them(url: str) -> None:
        waiting = iter([(number, way) for number in range(count) for way in (True, False)])
        await asyncio.gather(*(client(url, waiting) for _ in range(CLIENTS)))

    llm = open_tiny(
        save_tiny_chat(tmp_path, max_position_embeddings=3072), depth=DEPTH, max_requests=CLIENTS, num_slots=20_000
    )
    with live(llm) as served:
        asyncio.run(all_of_them(served.url))
        served.settle()
    accepted = 0
    for number, each in enumerate(asked):
        guessed, plain = (found[number, way]["choices"][0] for way in (True, False))
        assert guessed == plain, number
        assert guessed["finish_reason"] == "stop", (number, each["schema"], guessed)
        jsonschema_rs.validate(each["schema"], json.loads(guessed["text"]))
        accepted += found[number, True]["usage"]["speculation"]["accepted"]
        assert found[number, False]["usage"]["speculation"]["drafted"] == 0
    assert accepted > count
