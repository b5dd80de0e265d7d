"""Prompts for checks and demonstrations: read from JSON lines, or a few of our own."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

Messages = list[dict[str, str]]

REPEAT = """Repeat this list exactly, then add three more cities to it.

1. Lisbon, on the Tagus, with yellow trams and tiled walls
2. Porto, on the Douro, with port lodges and an iron bridge
3. Coimbra, on the Mondego, with an old university on a hill
4. Braga, with a long stairway up to a white church
5. Faro, behind a lagoon, with storks on its towers"""

EDIT = '''Add type hints to this function and return all of its code.

```python
def running_mean(values, window):
    """Means of the last `window` values, one for every value."""
    means = []
    for index in range(len(values)):
        start = max(0, index - window + 1)
        recent = values[start : index + 1]
        means.append(sum(recent) / len(recent))
    return means
```'''

BUILT_IN = (
    REPEAT,
    EDIT,
    "Explain in four sentences why the sky is blue at noon and red in the evening.",
    "Write a short letter to a neighbour who found your cat.",
    "What is 17 times 23? Show the steps.",
    "Extend this series by five terms and say the rule: 3, 6, 11, 18, 27, 38",
    "Name three differences between a violin and a viola.",
    'Correct the mistakes and return the sentence: "She go to school every days and have learn a lot."',
)
"""Prompts of our own: two that give text back, which lookups love, and six that do not."""


MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""Categories of MT-Bench, which Spec-Bench pools as multi-turn conversation."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a set.

    Attributes:
        name: for reports. content: a text, messages, or token ids. task: its kind, for figures by task.
    """

    name: str
    content: str | Messages | tuple[int, ...]
    task: str = "built-in"


def built_in() -> list[Prompt]:
    """The prompts that come with the package."""
    return [Prompt(f"built-in:{index}", text) for index, text in enumerate(BUILT_IN)]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a file of JSON lines, `.gz` or not; blank lines are passed over.

    A line is an object with `prompt` (a text; HumanEval) or `question` (GSM8K), `messages` (`[{"role", "content"}]`),
    or `turns` (user texts; the first one is asked, as MT-Bench and Spec-Bench do in their first turn). A name comes
    from `question_id`, `task_id` or `id`, else from the line's number; the task from `category`, else from the file.

    Raises:
        ConfigError: for a file that cannot be read, a bad line (named by file and number), or no prompts at all.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    stem = path.name.partition(".")[0]
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for line_number, line in enumerate(file, start=1):
                if line.strip():
                    prompts.append(_parse(line, f"{path}, line {line_number}", f"{path.name}:{line_number}", stem))
                if limit is not None and len(prompts) >= limit:
                    break
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a file of JSON lines, .gz or not") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: give a file of JSON lines, .gz or not") from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts: give one JSON object a line")
    return prompts


def load_prompts(paths: str | Path | Sequence[str] | None, limit: int | None = None) -> list[Prompt]:
    """The prompts of one file or several, or the built-in ones where there is none; at most `limit`."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} is out of range: give a whole number of at least 1")
    if paths is None:
        return list(islice(built_in(), limit))
    files = [paths] if isinstance(paths, (str, Path)) else paths
    return [prompt for path in files for prompt in read_prompts(path, limit)][:limit]


def _parse(line: str, where: str, name: str, task: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigError(f"{where} is not JSON ({problem}): give one object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no JSON object: give one with prompt, messages or turns")
    for key in ("question_id", "task_id", "id"):
        if key in row:
            name = str(row[key])
            break
    if isinstance(row.get("category"), str):
        task = "conversation" if row["category"] in MT_BENCH else row["category"]
    for key in ("prompt", "question"):
        if _is_text(row.get(key)):
            return Prompt(name, row[key], task)
    if _are_messages(row.get("messages")):
        return Prompt(name, [{"role": m["role"], "content": m["content"]} for m in row["messages"]], task)
    turns = row.get("turns")
    if isinstance(turns, list) and turns and _is_text(turns[0]):
        return Prompt(name, turns[0], task)
    raise ConfigError(
        f"{where} has no prompt or question (a text), messages (role and content) or turns (texts): add one of them"
    )


def _is_text(value: Any, empty: bool = False) -> bool:
    """A string of whole characters: JSON can also write half of a surrogate pair, which no tokenizer takes."""
    return isinstance(value, str) and (empty or value != "") and not re.search("[\ud800-\udfff]", value)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and value != []
        and all(
            isinstance(m, dict) and _is_text(m.get("role")) and _is_text(m.get("content"), empty=True) for m in value
        )
    )
