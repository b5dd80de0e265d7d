"""Medusa's heads served: residual blocks over the target's last state and the last known token, one for each position.

Sources: Cai et al., "Medusa" (2401.10774); that the heads know the last token is the first step of Hydra (2402.05109),
and that they see lower layers besides the last is EAGLE-3's (2503.01840). After n known tokens the heads read the taps
of position n - 2 and the token x_{n - 1}; head k predicts x_{n - 1 + k}. Heads of the paper's own form have no
`in_proj` (they start from the last state alone, normed as the target norms it), blocks without a second matrix,
z + silu(up(z)), and perhaps output rows of their own each: "plain" and "head" in their config.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.base import Linear
from outrider.models.heads.files import Artefact, check_target
from outrider.models.heads.layer import Parts
from outrider.models.heads.stage import Buffers, Rows, Stage, nowhere
from outrider.models.target import Target


class MedusaHeads:
    """K heads over one state.

    Attributes:
        taps: target layers it reads, the last one last. kept_ids: (V_d,) int64. num_heads: K. nbytes: of its weights.
        rates: by head and rank, how often that guess was the target's token where the heads before were right; None
            where nobody measured it, and the heads' own laws must do.

    Raises:
        ModelError: if the artefact was trained for another target or is not whole.
    """

    def __init__(self, artefact: Artefact, target: Target, kind: str | None = None) -> None:
        """kind: of the packed weights; see `stage.pack`."""
        check_target(artefact, target)
        parts = Parts(artefact, target, kind)
        hidden = self._hidden = parts.hidden
        self.taps: tuple[int, ...] = artefact.taps(target.num_layers)
        self.kept_ids = artefact.kept_ids().to(target.device)
        unknown = artefact.config.get("rates") == "unknown"
        measured = None if unknown else parts.tensor("rates", None, None).float().tolist()
        self.rates: list[list[float]] | None = measured
        self.num_heads = artefact.size("num_heads") if measured is None else len(measured)
        self._target = target
        self._kernels = target.kernels
        self._eps = parts.eps
        if not self.taps or not self.num_heads:
            raise ModelError(f"the {artefact.drafter} drafter reads no layer, or has no rates: train it again")
        self._tap_norms = parts.floats("tap_norms", len(self.taps), hidden)
        plain = bool(artefact.config.get("plain"))
        self._in = None if plain else parts.linear(["in_proj"], hidden, (len(self.taps) + 1) * hidden)
        self._embed_norm = None if plain else parts.floats("embed_norm.weight", hidden)
        blocks = sorted({int(name.split(".")[2]) for name in artefact.tensors if name.startswith("heads.0.")})
        if not blocks:
            raise ModelError(f"the {artefact.drafter} drafter has no heads: train it again")
        self._blocks: list[list[tuple[Linear, Linear]]] = [
            [_block(parts, f"heads.{k}.{b}", plain) for b in blocks] for k in range(self.num_heads)
        ]
        own = [f"outputs.{k}" for k in range(self.num_heads)] if artefact.config.get("head") == "each" else []
        self._heads = [parts.linear([name], len(self.kept_ids), hidden) for name in own] or [parts.kept_head()]
        self.nbytes = parts.nbytes
        shapes = {
            "taps": (len(self.taps) * hidden,),
            "token": (hidden,),
            "seen": ((len(self.taps) + 1) * hidden,),
            "z": (hidden,),
            "gate_up": (2 * hidden,),
            "gated": (hidden,),
            **{f"z{k}": (hidden,) for k in range(self.num_heads)},
        }
        self._stage = Stage(self._kernels, target.device, shapes, self._run)

    def logits(self, taps: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """The first `depth` heads: raw taps (A, n H), tokens (A,) int64 -> (A, depth, V_d) float32 over kept ids."""
        num_rows = tokens.shape[0]
        room = self._stage.room(num_rows)
        room["taps"].copy_(taps)
        room["gate_up"][:, self._hidden :] = 1.0  # silu(gate) * 1
        if self._in is not None:
            self._target.model.embed(tokens, out=room["token"])
        self._stage.run(nowhere(num_rows, taps.device))
        if len(self._heads) > 1:
            return torch.stack([self._heads[k](room[f"z{k}"]) for k in range(depth)], dim=1)
        states = torch.stack([room[f"z{k}"] for k in range(depth)], dim=1)
        return self._heads[0](states.flatten(0, 1)).view(num_rows, depth, -1)

    def _run(self, b: Buffers, _rows: Rows) -> None:
        kernels, hidden = self._kernels, self._hidden
        *states, token = b["seen"].split(hidden, dim=1)
        for tap, norm, state in zip(b["taps"].split(hidden, dim=1), self._tap_norms, states, strict=True):
            kernels.rms_norm(tap, norm, self._eps, out=state)
        start = states[-1]
        if self._in is not None and self._embed_norm is not None:
            kernels.rms_norm(b["token"], self._embed_norm, self._eps, out=token)
            start = self._in(b["seen"], residual=start, out=b["z"])
        for k, blocks in enumerate(self._blocks):
            z, out = start, b[f"z{k}"]
            for up, down in blocks:
                up(z, out=b["gate_up"][:, :hidden])
                down(kernels.silu_mul(b["gate_up"], out=b["gated"]), residual=z, out=out)
                z = out


def _block(parts: Parts, name: str, plain: bool) -> tuple[Linear, Linear]:
    """The two matrices of a residual block; the paper's has one, and the other then changes nothing."""
    up = parts.linear([f"{name}.up"], parts.hidden, parts.hidden)
    return up, parts.identity() if plain else parts.linear([f"{name}.down"], parts.hidden, parts.hidden)
