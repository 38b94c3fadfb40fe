"""Prepare `omnizoo verify`: scale down the config, choose the layouts, and run the one-process reference trial."""

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.schema import Config
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.sections.parallel import ParallelSection
from omnizoo.config.yaml_file import save_config
from omnizoo.models.build import build_model
from omnizoo.models.check_config_fields import EXPERTS, VISITED
from omnizoo.models.parameter_patterns import frozen, group_parameters, matching, still_frozen
from omnizoo.models.read_config import load_tokenizer, tokenizer_folder
from omnizoo.models.recipe import read_facts, recipe_of
from omnizoo.parallel.layout import SHORT, Layout, layouts_of, plan_layout
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import check
from omnizoo.training.causality_probe import active_dropout
from omnizoo.verification.small_run import shrink
from omnizoo.verification.trial import Trial, run_trial

TENSORS = ("gradients", "activations")  # fields of a trial
ROUNDED = "rounded"  # subfolder with the trial of one process in bf16


def prepare(
    config: Config, world: int, selection: str, precision: str, folder: Path, device: str = "cpu"
) -> list[Layout]:
    """Write the scaled-down config and the one-process trial to `folder`, and return the layouts to verify.

    Args:
        config: The user's config.
        world: Number of ranks of each layout.
        selection: Layouts to verify (see `choose`).
        precision: `fp32`, `fp64` or `bf16`.
        folder: Folder to write to; created if needed.
        device: Device type of the process.

    Raises:
        UserError: If the model cannot be verified, or does not support a listed layout.
    """
    folder.mkdir(parents=True, exist_ok=True)
    small = _with_groups(shrink(config, world, precision), config)
    layouts = choose(small, world, selection)
    save_config(small, folder / "config.yaml")
    torch.set_num_threads(1)
    with process_group((0, 1, 0), device=device) as process:
        if precision == "bf16":  # the reference is in fp32; a trial in bf16 gives the expected rounding error
            reference = run_trial(plain(small, precision="fp32"), Layout(), process)
            save_trial(run_trial(small, Layout(), process), folder / ROUNDED)
        else:
            reference = run_trial(plain(small), Layout(), process)
        save_trial(reference, folder)
    return layouts


def plain(config: Config, **changes: Any) -> Config:
    """Return the config of the reference trial, with `changes` in the `train` section.

    The reference trial runs without recompute, tiling, offload and compile.
    """
    return config.changed(
        parallel={"recompute": "none", "tile_tokens": None, "offload": []}, train={"compile": False, **changes}
    )


def _with_groups(small: Config, config: Config) -> Config:
    """Return `small` with the parameter groups and `model.freeze` patterns of `config` that match its model.

    The small copy has fewer layers than the model of `config`, so some patterns may match none of its parameters.
    """
    groups = config.optimizer.groups
    patterns = config.model.freeze
    if patterns:
        frozen(build_model(config.model, "fp32"), patterns)  # raises an error if a pattern matches no parameter
        small_model = build_model(small.model.model_copy(update={"freeze": []}), "fp32")
        small = small.changed(model={"freeze": still_frozen(small_model, patterns)})
    if not groups:
        return small
    # Raise an error if a pattern matches no parameter of the user's model.
    group_parameters(build_model(config.model, "fp32"), groups)
    small_groups = matching(build_model(small.model, "fp32"), groups)
    return small.changed(optimizer={"groups": small_groups})


def choose(config: Config, world: int, selection: str) -> list[Layout]:
    """Return the layouts of `world` ranks to verify.

    `selection` is `all` (every layout that the model supports), `few` (up to three layouts that use every axis),
    or a comma-separated list such as `dp2.uly2.ep4,ring8`. A listed layout that the model does not support raises a
    `UserError`.
    """
    model = build_model(config.model, config.train.precision)
    check_dropout(model)
    facts = read_facts(model)
    if selection not in ("all", "few"):
        layouts = [parse(name, world) for name in selection.split(",")]
        for layout in layouts:
            check(facts, layout, model)
        return layouts
    feasible = []
    for layout in layouts_of(world) if selection == "all" else few_layouts(world, bool(facts.experts)):
        try:
            check(facts, layout, model)
        except UserError:
            continue
        feasible.append(layout)
    return feasible


def few_layouts(world: int, experts: bool) -> list[Layout]:
    """Return three layouts: HSDP, Ulysses x ring, and FSDP (for MoE: FSDP x Ulysses with expert parallelism).

    Args:
        world: Number of ranks.
        experts: Whether the model has experts.
    """
    half = max(1, world // 2)
    last = Layout(dp_shard=half, ulysses=world // half, ep=world) if experts else Layout(dp_shard=world)
    return [Layout(dp_replicate=world // half, dp_shard=half), Layout(ulysses=world // half, ring=half), last]


def check_dropout(model: nn.Module) -> None:
    """Raise a `UserError` if dropout is active. Its random numbers depend on the layout, so layouts would differ."""
    for name, p in active_dropout(model).items():
        raise UserError(
            f"model: {name} has dropout (p = {p:g}) that no field of the model config turns off. Verify the model "
            "without it."
        )


def parse(name: str, world: int) -> Layout:
    """Return the layout with a short name such as `rep2.dp2.uly2.ring2.ep2`.

    Omitted axes have size 1. If `dp` is omitted, it takes the remaining ranks of the world.
    """
    axes = SHORT | {"sp": "ulysses"}
    sizes: dict[str, int] = {}
    for part in name.strip().split("."):
        axis = part.rstrip("0123456789")
        if axis not in axes or axis == part:
            raise UserError(
                f"--layouts: {part!r} in {name!r} is not an axis with a size, such as rep2, dp2, uly4, ring2 or ep2"
            )
        size = part[len(axis) :]
        if not re.fullmatch("[1-9][0-9]{0,5}", size) or axes[axis] in sizes:
            raise UserError(
                f"--layouts: {part[:40]!r} in {name!r} is invalid; expected each axis once, with a size of at least 1"
            )
        sizes[axes[axis]] = int(size)
    try:
        return plan_layout(ParallelSection.model_validate(sizes), world)
    except UserError as error:
        raise UserError(f"--layouts: {name}: {error}") from error


def with_family(config: Config, family: str) -> Config:
    """Return `config` with the default model of a model type instead of its own model.

    The number of experts is reduced. The tokenizer stays the same, and special token ids are changed to fit it.
    """
    check_family(family)
    tokens = len(load_tokenizer(config.model))
    inline = {"model_type": family, "vocab_size": tokens, **few_experts(family), **special_tokens(family, tokens)}
    model = {"config": inline, "tokenizer": tokenizer_folder(config.model), "attention": config.model.attention}
    return config.model_copy(update={"model": ModelSection.model_validate(model)})


def check_family(family: str) -> None:
    """Raise `UserError` if a model type is unknown or requires media."""
    if recipe_of(family).modalities is not None:
        raise UserError(f"--families: {family} is multimodal. Verify it with a config that has rows with media.")
    if family not in CONFIG_MAPPING:
        similar = get_close_matches(family, list(CONFIG_MAPPING), n=1)
        hint = f"did you mean {similar[0]}?" if similar else "the installed transformers has no such model type"
        raise UserError(f"--families: {family!r} is unknown; {hint}")


def default_fields(family: str) -> dict[str, Any]:
    """Return the fields of the default config of a model type."""
    try:
        fields: dict[str, Any] = AutoConfig.for_model(family).to_dict()
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"--families: {family} has no default config: {named_line(error)}") from error
    return fields


def special_tokens(family: str, vocabulary: int) -> dict[str, int]:
    """Return config fields that replace special token ids of a family which the vocabulary does not contain.

    They are replaced with the last id of the vocabulary.
    """
    ids = {key: value for key, value in default_fields(family).items() if key.endswith("_token_id")}
    return {key: vocabulary - 1 for key, value in ids.items() if isinstance(value, int) and value >= vocabulary}


def few_experts(family: str) -> dict[str, int]:
    """Return config fields for 16 experts, or none if the family has no experts.

    The number of experts per token is set to 2 if its default is missing or 0, or if the family has at most one expert
    by default. A missing number of shared experts is set to 1.
    """
    fields = default_fields(family)
    changes = {key: 16 for key in EXPERTS if key in fields}
    has_few_by_default = next((fields[key] in (None, 1) for key in changes), False)
    if "n_shared_experts" in fields and fields["n_shared_experts"] is None:
        changes["n_shared_experts"] = 1
    if not changes:
        return {}
    for key in VISITED:
        if key in fields and (has_few_by_default or not fields[key]):
            changes[key] = 2
    return changes


def save_trial(trial: Trial, folder: Path) -> None:
    """Write a trial to `folder`, with tensors as safetensors and other values as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = dict(vars(trial))
    for kind in TENSORS:
        tensors = {name: tensor.contiguous() for name, tensor in fields[kind].items()}
        save_file(tensors, folder / f"{kind}.safetensors")
        fields[kind] = list(tensors)  # safetensors sorts the names, so their order of execution is stored here
    (folder / "trial.json").write_text(json.dumps(fields))


def load_trial(folder: Path) -> Trial:
    """Read a trial that `save_trial` wrote."""
    fields = json.loads((folder / "trial.json").read_text())
    for kind in TENSORS:
        tensors = load_file(folder / f"{kind}.safetensors")
        fields[kind] = {name: tensors[name] for name in fields[kind]}
    return Trial(**fields)
