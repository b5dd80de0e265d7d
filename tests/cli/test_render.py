"""Colours, figures and lines for a person."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider.cli.render import number, print_json, speed_line, write_delta
from outrider.record import Tally
from tests.cli.fakes import FakeDelta, FakeResult

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def shown(text: str, ids: tuple[int, ...], num_accepted: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=20)
    write_delta(console, FakeDelta(text, ids, num_accepted), lambda ids: "".join(map(str, ids)))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("text", "ids", "num_accepted", "expected"),
    [
        ("123", (1, 2, 3), 2, f"{GREEN}12{PLAIN}3"),
        ("1", (1,), 0, "1"),
        ("1�", (1, 2), 1, f"{GREEN}1{PLAIN}�"),
        ("x", (1, 2), 1, f"{GREEN}x{PLAIN}"),  # the pieces do not add up
        ("[b]1[/b]", (9,), 0, "[b]1[/b]"),  # no markup of ours
        ("", (), 0, ""),
    ],
)
def test_accepted_guesses_are_coloured(text, ids, num_accepted, expected):
    assert shown(text, ids, num_accepted) == expected


def test_long_lines_are_not_broken():
    assert shown("9" * 50, (9,) * 50, 0) == "9" * 50


def test_speed_line():
    tally = Tally()
    tally.count(drafted=4, delivered=3)
    line = speed_line(FakeResult("12", (1, 2), 7, "ngram", tally, cached_tokens=5))
    assert line == (
        "2 tokens · 10.0 tokens/s · length · ngram: tau 3.00, 2 of 4 guesses accepted · "
        "5 prompt tokens from the cache · seed 7"
    )


def test_numbers():
    assert (number(1.234), number(None), number(1.26, 1)) == ("1.23", "-", "1.3")


def test_json_is_ascii_on_one_line_and_has_no_nan(capsys):
    print_json({"text": "é\n"})
    assert capsys.readouterr().out == '{"text": "\\u00e9\\n"}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"x": float("nan")})
