"""model.freeze: patterns of module and parameter names, for any model. An unmatched pattern raises an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import model_config, read_steps, write_config

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.build import build_model
from omnizoo.models.component_settings import ComponentSettings
from omnizoo.models.parameter_patterns import frozen, still_frozen
from omnizoo.training.loop import train


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(ModelSection(config=model_config("llama")), "fp32")


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["embed_tokens"], lambda name: "embed_tokens" not in name),
        (["model.layers.0"], lambda name: not name.startswith("model.layers.0.")),
        (["model.layers.0.*", "lm_head"], lambda name: not name.startswith(("model.layers.0.", "lm_head"))),
        (["*.q_proj.weight"], lambda name: "q_proj" not in name),
        (["mlp"], lambda name: ".mlp." not in name),
        (["model.layers.[0-1]"], lambda name: ".layers." not in name),
    ],
)
def test_freeze_patterns_freeze_only_matching_parameters(model: Any, patterns: list[str], trained: Any) -> None:
    found = frozen(model, patterns)
    names = [name for name, _ in model.named_parameters()]
    assert found == {name for name in names if not trained(name)}


def test_tied_parameter_is_frozen_by_either_name() -> None:
    tied = build_model(ModelSection(config=model_config("qwen3")), "fp32")
    assert frozen(tied, ["lm_head"]) == frozen(tied, ["embed_tokens"]) == {"model.embed_tokens.weight"}


def test_unmatched_freeze_pattern_suggests_nearest_names(model: Any) -> None:
    with pytest.raises(UserError, match=r"^model\.freeze\.1: 'emb_tokens' .* model\.embed_tokens"):
        frozen(model, ["lm_head", "emb_tokens"])
    assert still_frozen(model, ["model.layers.7.*", "lm_head"]) == ["lm_head"]


def test_freezing_all_parameters_raises() -> None:
    spec = ModelSection(config=model_config("llama"), freeze=["*"])
    built = build_model(spec, "fp32")
    with pytest.raises(UserError, match=r"^model: .* freezes every parameter"):
        ComponentSettings(built, spec).apply(built)


def test_training_changes_only_unfrozen_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path)
    overrides = ["--model.freeze", "[model.layers.0, embed_tokens]", "--train.steps", "2", "--data.workers", "0"]
    config = load_config(path, overrides)
    assert train(config).exit_code == 0
    assert len(read_steps(tmp_path / "run")) == 2
    before = build_model(config.model, "fp32")
    share = 1 - sum(p.numel() for n, p in before.named_parameters() if n in frozen(before, config.model.freeze)) / sum(
        p.numel() for p in before.parameters()
    )
    assert f"{share:.1%}" in capsys.readouterr().out
    assert not torch.isnan(torch.tensor(read_steps(tmp_path / "run")[-1]["loss"]))
