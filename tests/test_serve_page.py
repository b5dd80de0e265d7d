"""The server's page of the docs tells the truth: its examples run, its fields and routes are all there are."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.app import app
from outrider.server.app import create_app
from outrider.server.protocol import ChatAsk, CompletionAsk
from outrider.server.settings import ServeConfig
from tests.server.conftest import Live, live, open_tiny
from tests.server.tiny_chat import save_tiny_chat
from tests.test_readme import commands_known

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "serve.md").read_text()
HERE = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(open_tiny(save_tiny_chat(tmp_path_factory.mktemp("docs")), width=2)) as server:
        yield server


@pytest.mark.parametrize("source", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_python_runs(served: Live, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert HERE in source
    exec(source.replace(HERE, served.url), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("source", re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL))
def test_curl_runs(served: Live, source: str) -> None:
    words = shlex.split(source)
    assert words[:2] == ["curl", "-s"]
    body = words[words.index("-d") + 1]
    with served.http() as http:
        answer = http.post(words[2].removeprefix(HERE), content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    wish = json.loads(body).get("speculation", {})
    assert bool(answer.json()["usage"]["speculation"].get("trace")) == bool(wish.get("trace"))


def test_every_field_is_named() -> None:
    section = PAGE.split("## Fields")[1].split("## Speculation")[0]
    named = set(re.findall(r"`(\w+)", section))
    fields = {*CompletionAsk.model_fields, *ChatAsk.model_fields} - {"model", "prompt", "messages"}
    assert fields <= named
    refused = re.findall(r"`(\w+)`", section.split("never ignored")[1].split("\n\n")[0])
    assert len(refused) > 4
    assert not set(refused) & fields


def test_every_route_is_named(served: Live) -> None:
    named = set(re.findall(r"`?(?:GET|POST) (/[\w/]*)`", PAGE))
    routes = set(create_app(served.server).openapi()["paths"]) - {"/v1/models/{name}"}
    assert named == routes | {"/"}


def test_every_option_exists() -> None:
    known = commands_known(app)
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert named <= known
    settings = {"--" + name.replace("_", "-") for name in ServeConfig.__dataclass_fields__}
    assert settings - named <= {"--host", "--port", "--page", "--served-name"}
