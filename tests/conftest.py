"""What holds for every test: nothing is asked of a model hub, and one thread serves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before Transformers is imported anywhere: a test must not depend on what a hub answers today.
os.environ["HF_HUB_OFFLINE"] = "1"
# Without a GPU Triton's kernels run by its interpreter; it reads this when Triton itself is imported.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run side by side, a process a core; waking a second thread for tiny models costs more than it brings.

    The kernels' own tests name their threads.
    """
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _faults_are_raised() -> None:
    """An engine in use goes on without a drafter that does wrong; in a test that would go unseen."""
    from outrider.engine.step import Engine

    Engine.strict = True


@pytest.fixture(autouse=True, scope="session")
def _no_prices_of_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test measures is kept neither for the next run of the tests nor for whoever uses this machine."""
    from outrider.engine import kept_prices

    folder = tmp_path_factory.mktemp("prices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_prices, "cache_folder", lambda: folder)
        yield
