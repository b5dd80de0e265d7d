"""EAGLE-3's head served: one decoder layer over fused taps, and over its own states where it guesses ahead.

Source: Li et al., "EAGLE-3" (2503.01840), section 3; the norm before fusing and the normed state that is fed back are
EAGLE 3.1's. The entry at position j belongs to token x_j and uses the taps of position j - 1 (zeros for j = 0).
Heads of the paper's own form, and others that are served elsewhere, are told by fields of their config: "fed_back" is
"raw" where the state goes on unnormed, "residual" is "normed" where the normed feature does, "taps_normed" is
"together" or "no" where not each tap has a norm, "heads_normed" is true where queries and keys have one; "rows" and
"head" say whose the input and output rows are.
"""

from __future__ import annotations

from torch import Tensor

from outrider.cache.pages import Pages, PageSpec
from outrider.models.heads.files import Artefact, check_target
from outrider.models.heads.layer import Parts
from outrider.models.heads.stage import Buffers, Rows, Stage, nowhere
from outrider.models.target import Target


class Eagle3Head:
    """The layer and the draft vocabulary's head.

    Attributes:
        taps: target layers it reads. page: of its stack's one layer. kept_ids: (V_d,) int64. nbytes: of its weights.

    Raises:
        ModelError: if the artefact was trained for another target or is not whole.
    """

    def __init__(self, artefact: Artefact, target: Target, kind: str | None = None) -> None:
        """kind: of the packed weights; see `stage.pack`."""
        check_target(artefact, target)
        parts = Parts(artefact, target, kind)
        hidden = parts.hidden
        self.taps: tuple[int, ...] = artefact.taps(target.num_layers)
        self.kept_ids = artefact.kept_ids().to(target.device)
        self._target = target
        self._kernels = target.kernels
        self._eps = parts.eps
        self._fed_back_raw = artefact.config.get("fed_back", "normed") == "raw"
        self._residual_normed = artefact.config.get("residual", "feature") == "normed"
        self._embed = parts.embedding()
        self._fused = parts.fused_taps(len(self.taps))
        self._embed_norm = parts.floats("embed_norm.weight", hidden)
        self._feature_norm = parts.floats("feature_norm.weight", hidden)
        self._attention = parts.attention()
        self.page: PageSpec = self._attention.page
        self._qkv = parts.linear(["q_proj", "k_proj", "v_proj"], None, 2 * hidden)
        self._o = parts.linear(["o_proj"], hidden, self._attention.num_heads * self.page.key_dim)
        self._mlp = parts.mlp()
        self._final_norm = parts.floats("final_norm.weight", hidden)
        self._head = parts.kept_head("own")
        self.nbytes = parts.nbytes
        width = len(self.taps) * hidden
        self._fuse = Stage(
            self._kernels, target.device, {"taps": (width,), "normed": (width,), "feature": (hidden,)}, self._fuse_taps
        )

    def place(self, pages: Pages) -> None:
        """Its keys live in `pages`."""
        hidden = self._target.hidden_size
        self._pages = pages
        shapes = {
            "embedding": (hidden,),
            "feature": (hidden,),
            "pair": (2 * hidden,),
            "x": (hidden,),
            "normed": (hidden,),
            "state": (hidden,),
            **self._attention.buffers(),
            **self._mlp.buffers(),
        }
        self._layer = Stage(self._kernels, self._target.device, shapes, self._run_layer)

    def fuse(self, taps: Tensor) -> Tensor:
        """Raw taps (T, n H) of the positions before -> the features of T entries: (T, H)."""
        room = self._fuse.room(taps.shape[0])
        room["taps"].copy_(taps)
        self._fuse.run(nowhere(taps.shape[0], taps.device))
        return room["feature"]

    def states(self, tokens: Tensor, features: Tensor, rows: Rows) -> Tensor:
        """Run T entries, whose keys are written: tokens (T,) int64, features (T, H) -> states (T, H), next features."""
        room = self._layer.room(tokens.shape[0])
        self._embed(tokens, out=room["embedding"])
        room["feature"].copy_(features)
        self._layer.run(rows)
        return room["x" if self._fed_back_raw else "state"].clone()

    def logits(self, states: Tensor) -> Tensor:
        """(M, H) -> (M, V_d) float32 over the kept ids."""
        if self._fed_back_raw:
            states = self._kernels.rms_norm(states, self._final_norm, self._eps)
        return self._head(states)

    def _fuse_taps(self, b: Buffers, _rows: Rows) -> None:
        self._fused.apply(self._kernels, b["taps"], b["normed"], b["feature"])

    def _run_layer(self, b: Buffers, rows: Rows) -> None:
        kernels, hidden = self._kernels, b["x"].shape[1]
        kernels.rms_norm(b["embedding"], self._embed_norm, self._eps, out=b["pair"][:, :hidden])
        kernels.rms_norm(b["feature"], self._feature_norm, self._eps, out=b["pair"][:, hidden:])
        self._qkv(b["pair"], out=b["qkv"])
        mixed = self._attention.attend(kernels, b, rows, self._pages.keys[0], self._pages.values[0])
        residual = b["pair"][:, hidden:] if self._residual_normed else b["feature"]
        self._o(mixed, residual=residual, out=b["x"])
        self._mlp.apply(kernels, b, b["x"], b["normed"])
        kernels.rms_norm(b["x"], self._final_norm, self._eps, out=b["state"])
