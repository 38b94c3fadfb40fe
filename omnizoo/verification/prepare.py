"""Before the ranks start: what to try, and what one process gives for it."""

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

from omnizoo.assembly.groups import Groups, frozen, matching, still_frozen
from omnizoo.assembly.parallelize import check
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.load import save_config
from omnizoo.config.model_section import Model
from omnizoo.config.schema import Config
from omnizoo.models.build import build_model, load_tokenizer, tokenizer_folder
from omnizoo.parallel.layout import Layout, layouts_of
from omnizoo.parallel.process import process_group
from omnizoo.recipes.base import EXPERTS, VISITED, read_facts, recipe_of
from omnizoo.training.probe import active_dropout
from omnizoo.verification.small import shrink
from omnizoo.verification.trial import Trial, run_trial

ROUNDED = "rounded"  # of a run in bf16: the folder of one process in bf16


def prepare(config: Config, world: int, wanted: str, precision: str, folder: Path, device: str = "cpu") -> list[Layout]:
    """Write into `folder` what the ranks need, shrunken config and one-process trial; returns the layouts to try."""
    folder.mkdir(parents=True, exist_ok=True)
    small = _with_groups(shrink(config, world, precision), config)
    layouts = choose(small, world, wanted)
    save_config(small, folder / "config.yaml")
    torch.set_num_threads(1)
    with process_group((0, 1, 0), device=device) as process:
        if precision == "bf16":  # the reference is in fp32, and a run in bf16 tells how far from it bf16 is
            reference = run_trial(plain(small, precision="fp32"), Layout(), process)
            save_trial(run_trial(small, Layout(), process), folder / ROUNDED)
        else:
            reference = run_trial(plain(small), Layout(), process)
        save_trial(reference, folder)
    return layouts


def plain(config: Config, **changes: Any) -> Config:
    """`config` without what saves memory or time: layouts have it, what they are compared with does not."""
    changes |= {"recompute": "none", "tile_tokens": None, "offload": []}
    train = config.train.model_copy(update={"compile": False})
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=changes), "train": train})


def _with_groups(small: Config, config: Config) -> Config:
    """`small` with the parameter groups and patterns of `model.freeze` that it still has: a shrunken model has fewer
    layers than the config's own."""
    groups, patterns = config.optimizer.groups, config.model.freeze
    if patterns:
        frozen(build_model(config.model, "fp32"), patterns)
        left = still_frozen(build_model(small.model.model_copy(update={"freeze": []}), "fp32"), patterns)
        small = small.model_copy(update={"model": small.model.model_copy(update={"freeze": left})})
    if not groups:
        return small
    Groups(build_model(config.model, "fp32"), groups)  # patterns must mean something in the model they are for
    kept = matching(build_model(small.model, "fp32"), groups)
    return small.model_copy(update={"optimizer": small.optimizer.model_copy(update={"groups": kept})})


def choose(config: Config, world: int, wanted: str) -> list[Layout]:
    """`all`: every layout of `world` ranks that the model can have; `few`: three of them that use every axis; or those
    named, as `dp2.uly2.ep4,ring8`."""
    model = build_model(config.model, config.parallel.precision)
    refuse_dropout(model)
    facts = read_facts(model)
    if wanted not in ("all", "few"):
        layouts = [parse(name, world) for name in wanted.split(",")]
        for layout in layouts:
            check(facts, layout, model)
        return layouts
    feasible = []
    for layout in layouts_of(world) if wanted == "all" else few_layouts(world, bool(facts.experts)):
        try:
            check(facts, layout, model)
        except UserError:
            continue
        feasible.append(layout)
    return feasible


def few_layouts(world: int, experts: bool) -> list[Layout]:
    """Copies of a sharded model; both kinds of sequence parallelism; FSDP, with experts spread over all ranks."""
    half = max(1, world // 2)
    last = Layout(dp_shard=half, ulysses=world // half, ep=world) if experts else Layout(dp_shard=world)
    return [Layout(dp_replicate=world // half, dp_shard=half), Layout(ulysses=world // half, ring=half), last]


def refuse_dropout(model: nn.Module) -> None:
    """What is drawn in training depends on the layout: nothing could be compared."""
    for name, p in active_dropout(model).items():
        raise UserError(f"model: {name} drops out with p {p:g}, which no setting of the model's config turns off")


def parse(name: str, world: int) -> Layout:
    """`rep2.dp2.uly2.ring2.ep2`, axes of 1 left out, dp filled up to the world where it is left out."""
    axes = {"rep": "dp_replicate", "dp": "dp_shard", "uly": "ulysses", "sp": "ulysses", "ring": "ring", "ep": "ep"}
    sizes: dict[str, int] = {}
    for part in name.strip().split("."):
        axis = part.rstrip("0123456789")
        if axis not in axes or axis == part:
            raise UserError(f"--layouts: {part!r} in {name!r} is not an axis with a size: rep2, dp2, uly4, ring2, ep2")
        if not re.fullmatch("[1-9][0-9]{0,5}", size := part[len(axis) :]) or axes[axis] in sizes:
            raise UserError(f"--layouts: {part[:40]!r}: each axis has one size, at least 1")
        sizes[axes[axis]] = int(size)
    rest = Layout(**(sizes | {"dp_shard": 1}))
    sizes.setdefault("dp_shard", max(1, world // rest.world))
    layout = Layout(**sizes)
    if layout.world != world:
        raise UserError(f"--layouts: {name} is a layout of {layout.world} ranks, not of --world {world}")
    if layout.fsdp % layout.ep:
        raise UserError(f"--layouts: in {name}, ep {layout.ep} does not divide dp x uly x ring = {layout.fsdp}")
    return layout


def with_family(config: Config, family: str) -> Config:
    """`config` with another model: the family's default one with few experts, for the config's own tokenizer."""
    check_family(family)
    tokens = len(load_tokenizer(config.model))
    inline = {"model_type": family, "vocab_size": tokens, **few_experts(family), **special_tokens(family, tokens)}
    model = {"config": inline, "tokenizer": tokenizer_folder(config.model), "attention": config.model.attention}
    return config.model_copy(update={"model": Model.model_validate(model)})


def check_family(family: str) -> None:
    if recipe_of(family).modalities is not None:
        raise UserError(f"--families: {family} reads more than text, and needs a config and rows of its own")
    if family not in CONFIG_MAPPING:
        close = get_close_matches(family, list(CONFIG_MAPPING), n=1)
        hint = f"did you mean {close[0]}?" if close else "this transformers has no such family"
        raise UserError(f"--families: {family!r} is not known; {hint}")


def default_fields(family: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = AutoConfig.for_model(family).to_dict()
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"--families: {family} has no default config: {named_line(error)}") from error
    return fields


def special_tokens(family: str, vocabulary: int) -> dict[str, int]:
    """Ids that a family gives to special tokens by default, where they do not fit the vocabulary: its last one."""
    ids = {key: value for key, value in default_fields(family).items() if key.endswith("_token_id")}
    return {key: vocabulary - 1 for key, value in ids.items() if isinstance(value, int) and value >= vocabulary}


def few_experts(family: str) -> dict[str, int]:
    """Settings for a mixture of 16 experts, for families that can have one; some have no defaults for them."""
    fields = default_fields(family)
    experts = {key: 16 for key in EXPERTS if key in fields}
    few = next((fields[key] in (None, 1) for key in experts), False)
    if "n_shared_experts" in fields and fields["n_shared_experts"] is None:
        experts["n_shared_experts"] = 1
    return experts | {key: 2 for key in VISITED if key in fields and experts and (few or not fields[key])}


def save_trial(trial: Trial, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {
        "losses": trial.losses,
        "grad_norms": trial.grad_norms,
        "tokens": trial.tokens,
        "executed": trial.executed,
        "rounded": trial.rounded,
    }
    order = {"gradients": list(trial.gradients), "activations": list(trial.activations)}
    (folder / "reference.json").write_text(json.dumps(numbers | {"order": order}))
    save_file({name: tensor.contiguous() for name, tensor in trial.gradients.items()}, folder / "gradients.safetensors")
    save_file(trial.activations, folder / "activations.safetensors")


def load_trial(folder: Path) -> Trial:
    numbers = json.loads((folder / "reference.json").read_text())
    order = numbers.pop("order")

    def ordered(kind: str) -> dict[str, torch.Tensor]:
        tensors = load_file(folder / f"{kind}.safetensors")
        return {name: tensors[name] for name in order[kind]}

    return Trial(**numbers, gradients=ordered("gradients"), activations=ordered("activations"), calls={}, bytes={})
