"""What is exported is read by `speculators`' own classes: configs parse it, models have its very tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.export.folder import export
from tests import foreign_heads as theirs
from tests.drafters import test_heads as served
from tests.export.test_export import tiny, trained, whole  # noqa: F401 (fixtures)

pytestmark = pytest.mark.slow


def held(folder: Path, model_class, config_class) -> None:
    """The config is of this class, and the model that it makes has these tensors, but for copies of the target's."""
    config = config_class.from_pretrained(folder)
    assert type(config) is config_class
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 3
    there = {name: tuple(tensor.shape) for name, tensor in model_class(config).state_dict().items()}
    _, tensors = theirs.read(folder)
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert {name: there.get(name) for name in here} == here
    copies = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "d2t", "t2d", "lm_head.weight"}
    assert there.keys() - here.keys() <= copies
    if "dflash" not in config.speculators_model_type:
        assert "lm_head.weight" in here


def test_an_exported_eagle3(tiny, tmp_path):  # noqa: F811
    eagle3 = pytest.importorskip("speculators.models.eagle3", reason="`pip install speculators` reads it")
    export(trained("eagle3", tiny, tmp_path / "ours"), tiny, tmp_path / "there", "vllm", 3, None)
    held(tmp_path / "there", eagle3.Eagle3DraftModel, eagle3.Eagle3SpeculatorConfig)


@pytest.mark.parametrize("layout", [layout for layout in theirs.LAYOUTS if "medusa" not in layout])
def test_a_head_of_others_in_their_layout(layout, whole, tmp_path):  # noqa: F811
    eagle3 = pytest.importorskip("speculators.models.eagle3", reason="`pip install speculators` reads it")
    dflash = pytest.importorskip("speculators.models.dflash", reason="`pip install speculators` reads it")
    folder = theirs.make(layout, served.module().config, tmp_path / "head")
    if layout == "eagle3 of its authors":
        from tests.models.test_foreign_heads import changed

        changed(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    export(folder, whole, tmp_path / "there", "vllm", 3, None)
    if theirs.LAYOUTS[layout][0] == "block":
        held(tmp_path / "there", dflash.DFlashDraftModel, dflash.DFlashSpeculatorConfig)
    else:
        held(tmp_path / "there", eagle3.Eagle3DraftModel, eagle3.Eagle3SpeculatorConfig)
