"""Where a drafter is called: whatever it does wrong is told once, and texts go on without its guesses."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import DrafterError

if TYPE_CHECKING:
    from outrider.engine.step import Engine


@contextmanager
def guarded(engine: Engine) -> Iterator[None]:
    """Within the block a drafter may raise anything, or be found to have answered unlawfully.

    The engine loses its drafter then, for good, and is a plain one: no text depends on guesses, and one that broke its
    own books once would only waste time. Where faults are looked for (`Engine.strict`) it is raised as it is.
    """
    try:
        yield
    except Exception as error:  # a drafter is its author's program and may raise anything
        if engine.strict or engine.drafter is None:
            raise
        engine.fault, engine.drafter = _fault(engine.drafter.name, error), None
        logging.getLogger("outrider").warning("%s", engine.fault)


def _fault(name: str, error: Exception) -> DrafterError:
    """One sentence, with the place where an author will look."""
    if isinstance(error, DrafterError):
        said = str(error)
    else:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        said = f"drafter {name!r} failed ({what}, in {Path(place.filename).name}, line {place.lineno})"
    fault = DrafterError(f"{said}; texts go on without its guesses")
    fault.__cause__ = error
    return fault
