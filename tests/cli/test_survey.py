"""`outrider bench` of several drafters: what it refuses; its Markdown is a table whatever things are called."""

from __future__ import annotations

import pytest

from outrider.cli import main
from outrider.cli.survey import Survey, _markdown


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--limit", "0"], "limit=0"),
        (["--limit", "-2"], "limit=-2"),
        (["--against", "float32"], "against and repeats are for one drafter"),
        (["--repeats", "3"], "against and repeats are for one drafter"),
        (["--acceptance", "rejection"], "acceptance cannot be set for several drafters"),
        (["--no-adaptive"], "adaptive cannot be set for several drafters"),
        (["--depth", "0"], "depth=0"),
    ],
)
def test_what_the_table_would_not_honour_is_refused(words, part, capfd):
    assert main(["bench", "m", "--drafter", "ngram,suffix", *words]) == 2
    said = capfd.readouterr().err
    assert part in said
    assert said.count("\n") == 1


def test_a_drafter_named_twice_is_measured_once():
    survey = Survey("m", {"drafter": "ngram, suffix,ngram"}, [], None, [0.0], 8, ("speed",))
    assert survey.drafters() == ["ngram", "suffix"]


def test_a_name_with_a_bar_or_a_line_break_stays_in_its_cell():
    table = _markdown(("T", "task|one"), [("0", "what\nfailed | why")])
    assert table.splitlines() == ["| T | task\\|one |", "| --- | --- |", "| 0 | what failed \\| why |"]
