"""The page in a real browser: texts, colours, trees, the race, saved traces; and that it asks nobody but its server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import SamplingParams
from outrider.server.app import PAGE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: install one to test the page")
PROMPT = "abc the abc the"


def test_the_page_names_no_other_host() -> None:
    files = [path for path in PAGE.iterdir() if path.is_file()]
    assert {path.suffix for path in files} == {".html", ".css", ".js", ".svg"}
    for path in files:
        hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text()))
        assert hosts <= {"http://www.w3.org"}, path.name


def test_it_is_served_with_a_policy(served) -> None:
    with served.http() as http:
        answer = http.get("/")
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        for path in re.findall(r'(?:href|src)="(/page/[^"]+)"', answer.text):
            assert http.get(path).status_code == 200
        assert http.get("/page/../app.py").status_code == 404
        assert http.get("/page/%2e%2e/app.py").status_code == 404


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, served) -> Iterator[Any]:
    """An open page; whatever it asks elsewhere, or complains of, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if served.url not in request.url else None)
    page.goto(served.url)
    page.locator("#model", has_text="exact by seed").wait_for()
    page.locator("summary").click()
    yield page
    context.close()
    assert [text for text in wrong if not text.startswith("blob:")] == []


def fill(page, **settings) -> None:
    for name, value in {"temperature": "0", "max_tokens": "120", **settings}.items():
        page.fill(f"[name={name}]", value)


def send(page, prompt: str = PROMPT) -> None:
    page.fill("#prompt", prompt)
    page.click("#send")
    page.locator("#send:enabled").wait_for(timeout=60_000)


def said(page, pane: str = "output") -> str:
    return page.evaluate(f"[...document.querySelectorAll('#{pane} .token')].map(t => t.textContent).join('')")


@needs_browser
def test_a_completion_is_the_engines_text_in_colours(page, served) -> None:
    page.click("#tab-completion")
    fill(page)
    send(page)
    (result,) = served.llm.generate(PROMPT, SamplingParams(max_tokens=120), raw=True)
    whole = served.llm.prompts.decode(result.token_ids).rstrip("\ufffd")
    assert said(page).replace("\r", "\n").rstrip("\ufffd") == whole.replace("\r", "\n")
    assert page.locator("#output .token.accepted").count() == result.tally.accepted > 0
    assert page.locator("#output .token").count() == result.completion_tokens
    assert page.inner_text("#f-tokens") == str(result.completion_tokens)
    assert page.inner_text("#f-tau") == f"{result.tally.tau:.2f}"
    assert page.locator("#chart-tau rect").count() > 0
    assert re.fullmatch(r"\d+\.\d\d times", page.inner_text("#f-speed-up"))
    assert re.fullmatch(r"\d+\.\d\d to \d+\.\d\d", page.inner_text("#f-bounds"))


@needs_browser
def test_a_token_tells_of_itself_by_pointer_and_by_keyboard(page) -> None:
    page.click("#tab-completion")
    fill(page)
    send(page)
    page.locator("#output .token.accepted").first.hover()
    card = page.inner_text("#card")
    assert "guessed at depth" in card
    assert "p (target)\t1.00" in card
    assert " ms" in card
    assert page.locator("#card tr").count() == 4 + 1 + 5
    nodes = page.locator("#tree g").count()
    assert nodes >= 2
    assert page.locator("#tree g.accepted").count() >= 1
    page.focus("#output")
    page.keyboard.press("Home")
    assert page.locator("#output .token.chosen").get_attribute("data-index") == "0"
    page.keyboard.press("ArrowRight")
    assert page.locator("#output .token.chosen").get_attribute("data-index") == "1"
    page.keyboard.press("Escape")
    assert page.locator("#card").is_hidden()


@needs_browser
def test_a_chat_remembers_its_turns(page, served) -> None:
    fill(page, max_tokens="10")
    send(page, "ab")
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "the")
    messages = json.loads(asked.value.post_data)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    page.click("#clear")
    assert said(page) == ""


@needs_browser
def test_a_race_shows_the_same_text_twice(page) -> None:
    page.click("#tab-race")
    fill(page)
    send(page)
    assert "the same text" in page.inner_text("#verdict")
    assert "Estimated without the plain run: " in page.inner_text("#verdict")
    assert said(page, "lane-plain") == said(page, "lane-guessed") != ""
    assert page.locator("#lane-plain .token.accepted").count() == 0
    assert page.locator("#lane-guessed .token.accepted").count() > 0


@needs_browser
def test_a_race_counts_from_the_first_token(page, tmp_path: Path) -> None:
    """Whoever runs second finds the prompt cached: a prompt that takes long is no victory."""
    page.click("#tab-race")
    fill(page, max_tokens="40")
    send(page)
    with page.expect_download() as saved:
        page.click("#save")
    saved.value.save_as(tmp_path / "race.json")
    kept = json.loads((tmp_path / "race.json").read_text())
    for cycle in kept["traces"][0]["cycles"]:
        cycle["at"] += 100  # the plain run's prompt took so long
    plain, guessed = ([cycle["at"] for cycle in trace["cycles"]] for trace in kept["traces"])
    (tmp_path / "race.json").write_text(json.dumps(kept))
    page.click("#clear")
    page.set_input_files("#open", tmp_path / "race.json")
    page.locator("#verdict", has_text="the same text").wait_for()
    ratio = (plain[-1] - plain[0]) / (guessed[-1] - guessed[0])
    assert page.inner_text("#verdict").startswith(f"{ratio:.2f} times as fast")


@needs_browser
def test_clear_ends_what_runs(page, served) -> None:
    fill(page, max_tokens="900")
    page.fill("#prompt", "ab")
    page.click("#send")
    page.locator("#output .token").first.wait_for(state="attached")
    page.click("#clear")
    page.locator("#send:enabled").wait_for()
    served.settle()
    assert said(page) == ""


@needs_browser
def test_a_saved_trace_opens_again(page, tmp_path: Path) -> None:
    page.click("#tab-completion")
    fill(page)
    send(page)
    text, tau = said(page), page.inner_text("#f-tau")
    with page.expect_download() as saved:
        page.click("#save")
    kept = tmp_path / "trace.json"
    saved.value.save_as(kept)
    page.click("#clear")
    page.set_input_files("#open", kept)
    page.locator("#output .token").first.wait_for(state="attached")
    assert (said(page), page.inner_text("#f-tau")) == (text, tau)
    other = tmp_path / "other.json"
    whole = json.loads(kept.read_text())
    for wrong in ("{", "null", "{}", *map(json.dumps, _spoilt(whole))):
        other.write_text(wrong)
        page.click("#clear")
        page.set_input_files("#open", other)
        page.locator("#problem", has_text="no trace of Outrider").wait_for()
        page.set_input_files("#open", kept)
        page.locator("#problem").wait_for(state="hidden")
        assert said(page) == text


def _spoilt(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A saved file with something missing or wrong."""
    yield {**whole, "version": 2}
    yield {**whole, "traces": []}
    yield {name: value for name, value in whole.items() if name != "traces"}
    (trace,) = whole["traces"]
    cycle = trace["cycles"][0]
    wrong_cycles = (
        {},
        {**cycle, "tokens": []},
        {**cycle, "drawn": None},
        {**cycle, "tokens": [{**cycle["tokens"][0], "p": "1"}]},
    )
    for cycles in ([], *([wrong] for wrong in wrong_cycles)):
        yield {**whole, "traces": [{**trace, "cycles": cycles}]}


@needs_browser
def test_a_refusal_is_shown_as_the_server_said_it(browser, served) -> None:
    page = browser.new_page()
    page.goto(served.url)
    page.locator("summary").click()
    fill(page, max_tokens="5000")
    send(page)
    assert "the context's 1024" in page.inner_text("#problem")
    assert page.input_value("#prompt") == PROMPT, "what was refused can be mended"
    page.close()


@needs_browser
def test_it_can_be_stopped_and_is_used_without_a_pointer(page, served) -> None:
    fill(page, max_tokens="900")
    page.focus("#prompt")
    page.keyboard.type("ab")
    page.keyboard.press("Control+Enter")
    page.locator("#output .token").first.wait_for(state="attached")
    page.click("#stop")
    page.locator("#send:enabled").wait_for()
    served.settle()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-completion", "aria-selected") == "true"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea, svg')].filter(e => !e.labels?.length"
        " && !e.ariaLabel && !e.textContent.trim() && !e.getAttribute('aria-label')).map(e => e.outerHTML)"
    )
    assert unnamed == []


@needs_browser
def test_light_and_dark(page) -> None:
    def paper() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    before = paper()
    page.click("#theme")
    assert paper() != before
    page.click("#theme")
    assert paper() == before
