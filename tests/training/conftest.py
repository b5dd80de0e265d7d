"""One tiny target that has learnt a grammar, and its replies, for all tests of training."""

from __future__ import annotations

import pytest

from outrider.training.corpus import Corpus
from tests.training import grammar


@pytest.fixture(scope="session")
def taught():
    return grammar.make_target()


@pytest.fixture(scope="session")
def replies(taught, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replies")
    grammar.write_replies(taught, folder)
    return Corpus.read(folder)
