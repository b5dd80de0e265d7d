"""Every mistake a user can make, in one sentence that names the remedy."""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all errors that are meant for a person; `str(error)` is one sentence with its remedy."""


class ConfigError(OutriderError):
    """A setting is unknown, contradictory or out of range."""


class RequestError(OutriderError):
    """A single request cannot be honoured exactly; the others go on."""


class ModelError(OutriderError):
    """A model, tokenizer or weight file cannot be used as a target or drafter."""


class DrafterError(OutriderError):
    """A drafter broke a rule of its door (docs/add_a_drafter.md); texts never suffer from it, they go on without."""


class FetchError(OutriderError):
    """A download failed, was interrupted or does not match its checksum; nothing half-made is left."""


class CapacityError(OutriderError):
    """Something does not fit into the memory that was planned for it."""


class NumericsError(OutriderError):
    """A model produced NaN where a law was needed; only the request that met it fails."""


class KernelError(OutriderError):
    """A kernel could not be built or failed its self-test on this device."""


class RankError(OutriderError):
    """Processes that share a target under `torchrun` do not meet, or one of them is lost: the job is over."""


class TrainingError(OutriderError):
    """A drafter cannot be trained, or its training cannot go on; finished checkpoints and data stay as they are."""
