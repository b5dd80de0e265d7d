"""What can be set of a server, beside its engine; its limits, and who may ask."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

from outrider.config import refuse_less
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything that shapes a server.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        served_name: the model's name in requests and answers (None: as it was given).
        api_key_file: a file with one key a line; whoever asks must bring one of them (None: anyone may ask).
        allow_origin: a web origin whose pages may call the server, or "*" (None: none, CORS is off).
        max_queue: requests that may wait beside those that run; more are refused with status 429.
        max_body: most bytes of a request's body.
        max_samples: most samples (prompts times n) of one request.
        max_prompt_tokens, max_output_tokens: of one prompt and of one completion (None: what the context holds).
        max_logprobs: most alternatives told of a token.
        request_timeout: most seconds from a request's arrival to its end (None: no limit).
        shutdown_grace: seconds that running requests get to finish when the server is told to stop.
        good_first_token, good_token: seconds to the first token and mean seconds of each other one within which an
            answer counts as good in `/metrics`.
        page: serve the playground at `/`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_key_file: str | None = None
    allow_origin: str | None = None
    max_queue: int = 256
    max_body: int = 4 * 2**20
    max_samples: int = 128
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_logprobs: int = 20
    request_timeout: float | None = None
    shutdown_grace: float = 30.0
    good_first_token: float = 2.0
    good_token: float = 0.2
    page: bool = True

    def __post_init__(self) -> None:
        refuse_less(
            self,
            "a number",
            port=0,
            max_queue=0,
            max_body=1,
            max_samples=1,
            max_prompt_tokens=1,
            max_output_tokens=1,
            max_logprobs=0,
            shutdown_grace=0,
        )
        if self.port > 65535:
            raise ConfigError(f"port={self.port} is out of range: ports end at 65535")
        for name in ("good_first_token", "good_token"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} is out of range: give seconds above 0")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"request_timeout={self.request_timeout!r} is out of range: give seconds above 0")

    def keys(self) -> tuple[bytes, ...]:
        """The keys of `api_key_file`; none where there is no file.

        Raises:
            ConfigError: the file cannot be read, or holds no key.
        """
        return () if self.api_key_file is None else keys_in(self.api_key_file)


def keys_in(file: str, option: str = "api_key_file") -> tuple[bytes, ...]:
    """The keys in a file, a line each; blank lines and those that begin with # are none.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    try:
        text = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8)
    except (OSError, ValueError) as error:  # a null byte in its name
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option}={file!r} cannot be read ({problem}): give a file with a key a line") from error
    keys = tuple(key for line in text.split(b"\n") if (key := line.strip()) and not key.startswith(b"#"))
    if not keys:
        raise ConfigError(f"{option}={file!r} holds no key: write one a line, or leave it out")
    return keys
