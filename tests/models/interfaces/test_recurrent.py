"""Recurrent layers: packs compared with separate samples in transformers, training on ranks compared with one process,
and errors if our replacements are not used."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.yaml_file import save_config
from omnizoo.models.build import build_model
from omnizoo.models.check_config_fields import EXPERTS
from omnizoo.models.interfaces import recurrent
from omnizoo.models.interfaces.attention import packed_inputs
from omnizoo.models.interfaces.recurrent import has_states
from omnizoo.models.small_config import Shrinking, shrink_config
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.process import Process
from omnizoo.recipes.zoo import families
from omnizoo.training.causality_probe import probe
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.prepare import parse, prepare, with_family
from omnizoo.verification.rank_processes import run_in_processes
from omnizoo.verification.small_run import shrink
from omnizoo.verification.trial import run_trial

ROOT = Path(__file__).parents[3]
VOCABULARY = 64
FEW = 16  # experts, at most
# Each family has a different recurrence; `make verify-all` covers the others.
COVERING = ("qwen3_5_text", "kimi_linear", "lfm2", "nemotron_h")
HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "lfm2"),
    *("lfm2_moe", "mamba2", "bamba", "nemotron_h", "granitemoehybrid", "falcon_h1"),
)


def shrunken(family: str) -> dict[str, Any]:
    config = shrink_config(AutoConfig.for_model(family), Shrinking(vocabulary=VOCABULARY))
    chunks = dict.fromkeys({"chunk_size", "mamba_chunk_size"} & config.keys(), 32)  # of transformers' own code
    return config | chunks | {name: min(config[name], FEW) for name in EXPERTS if name in config}


def small(family: str, precision: str = "fp32") -> tuple[nn.Module, nn.Module]:
    """Return the model that we build, and the transformers model with the same weights."""
    config = shrunken(family)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        ours = build_model(ModelSection(config=config), precision, "cpu")
        for name, parameter in ours.named_parameters():  # nothing begins as zero
            parameter.add_(0.1 * torch.randn(parameter.shape))
            if name.endswith("A_log"):  # slow decay: of states that are gone at once, gradients are mostly rounding
                parameter.sub_(3)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    theirs = theirs.to(next(ours.parameters()).dtype)
    for model in (ours, theirs):
        model.set_experts_implementation("eager")  # grouped matmuls take no fp64
    theirs.load_state_dict(ours.state_dict())
    return ours.train(), theirs.train()


@pytest.mark.parametrize("family", [f if f in COVERING else pytest.param(f, marks=pytest.mark.long) for f in HYBRIDS])
def test_recurrent_pack_matches_separate_samples_in_transformers(family: str) -> None:
    ours, theirs = small(family, "fp64")
    lengths = [70, 3, 19]
    ids = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    boundaries = torch.tensor([0, 70, 73, 92], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with keep_precision("fp64"):
        packed = ours(input_ids=ids[None], position_ids=positions[None], **packed_inputs(boundaries, 70)).logits[0]
        alone = torch.cat([theirs(input_ids=sample[None], use_cache=False).logits[0] for sample in ids.split(lengths)])
        weights = torch.randn(alone.shape, dtype=alone.dtype, generator=torch.Generator().manual_seed(1))
        for logits in (packed, alone):
            (logits * weights).sum().backward()
    assert (packed - alone).norm() <= 1e-9 * alone.norm()
    worst = {}
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None and other.grad is not None:
            worst[name] = float((own.grad - other.grad).norm() / other.grad.norm().clamp(min=1e-12))
    assert max(worst.values()) <= 1e-9, max(worst, key=worst.__getitem__)


@pytest.mark.long
def test_list_of_recurrent_families_is_complete() -> None:
    found = set()
    for entry in families():
        if not entry.is_omni:
            model = build_model(ModelSection(config=shrunken(entry.family)), "fp32")
            found |= {entry.family} if has_states(model) else set()
    assert found == set(HYBRIDS)


def test_binding_states_leaves_other_models_unchanged() -> None:
    theirs = small("qwen3_5_text")[1]
    layers = [m for m in theirs.modules() if "causal_conv1d_fn" in inspect.unwrap(type(m).forward).__code__.co_names]
    assert layers
    for layer in layers:
        assert "forward" not in vars(layer)
        home = inspect.getmodule(type(layer))
        assert all(
            getattr(home, name).__module__ == home.__name__ for name in recurrent.REPLACEMENTS if hasattr(home, name)
        )


# Families whose original code silently carries the state into the next sample.
SILENT = ("kimi_linear", "lfm2", "bamba", "nemotron_h")


@pytest.mark.parametrize("family", SILENT)
def test_recurrent_layer_without_sample_boundaries_raises(family: str) -> None:
    ours, _ = small(family)
    ours.set_attn_implementation("eager")
    with pytest.raises(UserError, match=r"^model: .* sample boundaries"):
        ours(input_ids=torch.arange(8)[None], use_cache=False)
    ours.eval()
    with torch.no_grad():  # as generation does it
        ours(input_ids=torch.arange(8)[None], use_cache=False)


@pytest.mark.parametrize("family", SILENT)
def test_recurrent_model_without_replacements_raises(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "REPLACEMENTS", {})
    with pytest.raises(UserError, match=r"sample boundaries"):
        build_model(ModelSection(config=shrunken(family)), "fp32")


@pytest.mark.parametrize("family", SILENT)
def test_probe_detects_state_carried_across_samples(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: the original functions of transformers instead of our replacements."""
    monkeypatch.setattr(
        recurrent, "REPLACEMENTS", dict.fromkeys(recurrent.REPLACEMENTS, lambda module, original: original)
    )
    with pytest.raises(UserError, match="attends across the samples of a pack"):
        probe(ModelSection(config=shrunken(family)))


def many_steps(process: Process, folder: Path, name: str) -> None:
    trial = run_trial(load_config(folder / "config.yaml", []), parse(name, process.world_size), process)
    if process.rank == 0:
        (folder / f"{name}.json").write_text(json.dumps([trial.losses, trial.grad_norms]))


@pytest.mark.long
@pytest.mark.slow
def test_recurrent_training_on_ranks_matches_one_process(tmp_path: Path) -> None:
    config = shrink(with_family(load_config(ROOT / "examples/text_tiny.yaml", []), "qwen3_5_moe_text"), 4, "fp64")
    save_config(
        config.model_copy(update={"train": config.train.model_copy(update={"steps": 20})}), tmp_path / "config.yaml"
    )
    names = {"dp1": 1, "dp2.uly2.ep4": 4, "ring4": 4}
    for name, world in names.items():
        run_in_processes(world, many_steps, tmp_path, name)
    one, *others = (
        torch.tensor(json.loads((tmp_path / f"{name}.json").read_text()), dtype=torch.float64) for name in names
    )
    assert one.shape == (2, 20)
    assert one[0, -1] < one[0, 0]
    for found in others:
        torch.testing.assert_close(found, one, rtol=1e-9, atol=0)


@pytest.mark.slow
@pytest.mark.long
def test_hybrid_model_with_recompute_verifies_in_fp64(tmp_path: Path) -> None:
    config = load_config(ROOT / "examples/text_tiny.yaml", ["--parallel.recompute", "full"])
    layouts = prepare(with_family(config, "qwen3_5_moe_text"), 4, "dp2.uly2.ep4,ring4", "fp64", tmp_path)
    verdicts = [verdict_of(tmp_path, layout) for layout in layouts]
    assert [verdict.reason for verdict in verdicts if not verdict.passed] == []
