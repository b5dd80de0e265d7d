"""`outrider generate`: one prompt, answered as a stream of text or as one JSON object."""

from __future__ import annotations

from typing import Any

from outrider.cli.options import Json, Model, Prompt, Raw, Settings, read_prompt, takes
from outrider.cli.render import notes, print_json, speed_line, write
from outrider.cli.session import session
from outrider.config import EngineConfig
from outrider.errors import RequestError
from outrider.request import SamplingParams


@takes(EngineConfig, SamplingParams)
def generate(model: Model, prompt: Prompt, *, settings: Settings, raw: Raw = False, as_json: Json = False) -> None:
    """Answer one prompt; the text streams to standard output."""
    text, params = read_prompt(prompt), settings.params()
    with session(model, settings.engine) as llm:
        if as_json:
            results = llm.generate(text, params, raw=raw)
            for result in results:
                raise_failed(result)
            print_json(as_object([result.to_json() for result in results]))
        elif params.n > 1:
            for sample, result in enumerate(llm.generate(text, params, raw=raw), start=1):
                raise_failed(result)
                write(f"[{sample} of {params.n}] {result.text}\n")
                notes().print(speed_line(result), style="dim", markup=False)
        else:
            result = stream(llm, text, params, raw)
            notes().print(speed_line(result), style="dim", markup=False)


def stream(llm: Any, prompt: Any, params: SamplingParams, raw: bool = False) -> Any:
    """Write an answer as it comes and return its result.

    Raises:
        OutriderError: why the request failed.
    """
    result = None
    for delta in llm.stream(prompt, params, raw=raw):
        write(delta.text)
        result = delta.result or result
    write("\n")
    raise_failed(result)
    return result


def raise_failed(result: Any) -> None:
    """Turn the sentence of a failed result back into an error."""
    if result.error is not None:
        raise RequestError(result.error)


def as_object(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One object for one prompt: the first sample's fields and, where there are several, all of them as `samples`."""
    return samples[0] if len(samples) == 1 else {**samples[0], "samples": samples}
