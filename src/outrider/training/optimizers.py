"""Which optimiser moves which weight: Muon the matrices between states, AdamW tables, heads and norms.

Sources: Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon); updates scaled to the size of AdamW's, so that
both share one learning rate (Liu et al., 2502.16982, section 2.2).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from outrider.training.base import DraftModule
from outrider.training.settings import TrainConfig

BETAS = (0.9, 0.95)


def optimizers(module: DraftModule, config: TrainConfig) -> list[Optimizer]:
    """One optimiser for each group of parameters that has any; their learning rates are set before every step."""
    matrices = _matrices(module) if config.optimizer == "muon" else []
    moved = {id(weight) for weight in matrices}
    others = [weight for weight in module.parameters() if id(weight) not in moved]
    made: list[Optimizer] = []
    if matrices:
        made.append(Muon(matrices, lr=0.0, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"))
    if others:
        on_gpu = others[0].device.type == "cuda"
        made.append(AdamW(others, lr=0.0, betas=BETAS, weight_decay=config.weight_decay, fused=on_gpu))
    return made


def _matrices(module: DraftModule) -> list[Tensor]:
    """Weights of linears from states to states: none that speaks of ids, which Muon's authors leave to AdamW."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    return [
        part.weight
        for part in module.modules()
        if isinstance(part, nn.Linear) and part.out_features != len(module.kept_ids) and id(part.weight) not in tables
    ]
