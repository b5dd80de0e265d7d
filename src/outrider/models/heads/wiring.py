"""Is a trained drafter what training wrote, and its target the one it was trained for: else its guesses are just weak.

A digest over everything in the artefact finds any edit of it. Of its target the artefact holds how positions are
rotated, and the likeliest token at each place of a fixed text; the latter is compared as a share, since weights in 8
bits move a few of them (SmolLM2-135M: bfloat16 2 of 64, 8 bits none, 4 bits 22, other weights most).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.batch import BatchBuilder
from outrider.models.target import Target

ALIKE = 0.9
"""Share of the places at which two forms of one target say the same."""
_BLOCK = 16
_PLACES = 64
_TEXT = (
    "The water of a river comes from rain and snow. It runs downhill, because it is heavier than air, and on its way "
    "to the sea it carries sand and stones with it. def add(a, b): return a + b. Question: what is 12 + 30? "
    "Answer: 42. In the year 1969 two men walked on the Moon; a third one waited for them above. What they brought "
    "home was studied for many years, and it told people how old the Moon is."
)


def seal(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A digest of all that an artefact says: its fields, and every tensor's name, type, shape and bits."""
    plain = json.loads(json.dumps(dict(config)))  # as it is read back
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def signature(target: Target) -> dict[str, str]:
    """What tells a target from others of its sizes and vocabulary: numbers in a row, separated by spaces.

    "rotary": the angles by which position 1 is rotated. "says": the likeliest id after each token of a fixed text.
    """
    return {
        "rotary": " ".join(f"{angle:.6g}" for angle in _angles(target).tolist()),
        "says": " ".join(map(str, _says(target))),
    }


def doubts(drafter: str, described: Mapping[str, Any], target: Target) -> list[str] | None:
    """Sentences on how a target differs from the one that a drafter was trained for.

    Args:
        described: the artefact's "target" entry.

    Returns:
        None where the entry has no `signature`: an artefact of an earlier version.
    """
    if not {"rotary", "says"} <= described.keys():
        return None
    found = []
    there, here = _numbers(described["rotary"]), _angles(target)
    if there.shape != here.shape or not torch.allclose(there, here, rtol=1e-3, atol=1e-7):
        found.append(
            f"the {drafter} drafter was trained for a target that rotates positions by other angles (another rope "
            "theta or scaling): fewer of its guesses will hold"
        )
    told, says = described["says"].split(), [str(token) for token in _says(target)]
    same = sum(a == b for a, b in zip(told, says, strict=False))
    if len(told) != len(says) or same < ALIKE * len(says):
        found.append(
            f"the {drafter} drafter was trained for a target that says the same as this one at {same} of {len(says)} "
            "places of a fixed text (another model of these sizes, another tuning of it, or coarser weights): fewer "
            "of its guesses will hold"
        )
    return found


def _angles(target: Target) -> Tensor:
    """(D_rot / 2,) float32, in radians."""
    cos, sin = target.model.rotary()
    return torch.atan2(sin[1], cos[1]).float().cpu()


def _says(target: Target) -> list[int]:
    """The likeliest id after each of the first tokens of the fixed text."""
    ids = target.tokenizer.encode(_TEXT, add_special_tokens=False)
    ids = [token for token in ids if 0 <= token < target.vocab_size][: min(_PLACES, target.max_positions)]
    if not ids:
        return []
    builder = BatchBuilder(_BLOCK)
    builder.request(range(1, 1 + -(-len(ids) // _BLOCK)))  # slot 0 belongs to nobody
    builder.line(0, ids, len(ids))
    pages = target.make_pages((2 + len(ids) // _BLOCK) * _BLOCK)
    says: list[int] = target.forward(builder.build(target.device), pages).logits.argmax(dim=1).tolist()
    return says


def _numbers(text: str) -> Tensor:
    return torch.tensor([float(word) for word in text.split()])
