"""One tiny target that has learnt a grammar, and its replies, for all tests of training; one thread for tiny models."""

from __future__ import annotations

import pytest
import torch

from outrider.training.corpus import Corpus
from tests.training import grammar


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def taught():
    torch.set_num_threads(1)
    return grammar.make_target()


@pytest.fixture(scope="session")
def replies(taught, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replies")
    grammar.write_replies(taught, folder)
    return Corpus.read(folder)
