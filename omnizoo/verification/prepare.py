"""Before the ranks start: what to try, and what one process gives for it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from omnizoo.config.errors import UserError
from omnizoo.config.load import save_config
from omnizoo.config.schema import Config, Model
from omnizoo.models.build import build_model, load_tokenizer, tokenizer_folder
from omnizoo.parallel.layout import Layout, layouts_of
from omnizoo.parallel.process import process_group
from omnizoo.recipes.attach import check
from omnizoo.recipes.base import read_facts, recipe_of
from omnizoo.recipes.groups import Groups, matching
from omnizoo.verification.shrink import shrink
from omnizoo.verification.trial import Trial, run_trial


def prepare(config: Config, world: int, wanted: str, precision: str, folder: Path) -> list[Layout]:
    """Write into `folder` what the ranks need, shrunken config and one-process trial; returns the layouts to try."""
    folder.mkdir(parents=True, exist_ok=True)
    small = _with_groups(shrink(config, world, precision), config)
    layouts = choose(small, world, wanted)
    save_config(small, folder / "config.yaml")
    torch.set_num_threads(1)
    with process_group() as process:
        save_trial(run_trial(small, Layout(), process), folder)
    return layouts


def _with_groups(small: Config, config: Config) -> Config:
    """`small` with the parameter groups that it still has: a shrunken model has fewer layers than the config's own."""
    groups = config.optimizer.groups
    if not groups:
        return small
    Groups(build_model(config.model, "fp32"), groups)  # patterns must mean something in the model they are for
    left = matching(build_model(small.model, "fp32"), groups)
    return small.model_copy(update={"optimizer": small.optimizer.model_copy(update={"groups": left})})


def choose(config: Config, world: int, wanted: str) -> list[Layout]:
    """`all`: every layout of `world` ranks that the model can have; or those named, as `dp2.uly2.ep4,ring8`."""
    model = build_model(config.model, config.parallel.precision)
    facts = read_facts(model)
    if wanted != "all":
        layouts = [parse(name, world) for name in wanted.split(",")]
        for layout in layouts:
            check(facts, layout, model)
        return layouts
    feasible = []
    for layout in layouts_of(world):
        try:
            check(facts, layout, model)
        except UserError:
            continue
        feasible.append(layout)
    return feasible


def parse(name: str, world: int) -> Layout:
    """`rep2.dp2.uly2.ring2.ep2`, axes of 1 left out, dp filled up to the world where it is left out."""
    axes = {"rep": "dp_replicate", "dp": "dp_shard", "uly": "ulysses", "sp": "ulysses", "ring": "ring", "ep": "ep"}
    sizes: dict[str, int] = {}
    for part in name.strip().split("."):
        axis = part.rstrip("0123456789")
        if axis not in axes or axis == part:
            raise UserError(f"--layouts: {part!r} in {name!r} is not an axis with a size: rep2, dp2, uly4, ring2, ep2")
        sizes[axes[axis]] = int(part[len(axis) :])
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
    if recipe_of(family).modalities is not None:
        raise UserError(f"--families: {family} reads more than text, and needs a config and rows of its own")
    tokens = len(load_tokenizer(config.model))
    fields = AutoConfig.for_model(family).to_dict()
    few: dict[str, int] = {key: 16 for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in fields}
    inline = {"model_type": family, "vocab_size": tokens, **few}
    model = {"config": inline, "tokenizer": tokenizer_folder(config.model)}
    return config.model_copy(update={"model": Model.model_validate(model)})


def save_trial(trial: Trial, folder: Path) -> None:
    numbers = {
        "losses": trial.losses,
        "grad_norms": trial.grad_norms,
        "tokens": trial.tokens,
        "executed": trial.executed,
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
