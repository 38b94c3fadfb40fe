"""A user's config, small enough to prove on a CPU: a small model, small steps, the user's own data."""

import re
from collections.abc import Iterable
from typing import Any

from omnizoo.assembly.shrink import shrink_model
from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model
from omnizoo.config.schema import Config
from omnizoo.models.adapter import attached, matches
from omnizoo.models.build import build_model, is_own_module, read_model_config
from omnizoo.recipes.base import own_recipe, recipe_of
from omnizoo.training.probe import probe

PACK_TOKENS = 96
TILE_TOKENS = 7
RANK = 4  # of an adapter


def shrink(config: Config, world: int, precision: str) -> Config:
    """The config that `omnizoo verify` runs: `config` with a small random model and small steps for `world` ranks.

    A model that is not causal, or lets packed samples see each other, is refused here as `train` refuses it.
    """
    probed = probe(config.model)
    if probed.unchecked:
        raise UserError(f"model: nothing can be proved of it on this host: {probed.unchecked}")
    if probed.stubborn:
        raise UserError(
            "model: it draws random numbers in training (dropout, jitter) that no setting of its config turns off, and "
            "they depend on the layout; verify it without them"
        )
    data: dict[str, Any] = {"look_ahead": 16, "lanes": world, "workers": 0}
    if not reads_media(config.model) and config.preference_pairs == "refused":  # which must fit into a pack, and items
        data["pack_tokens"] = min(config.data.pack_tokens, PACK_TOKENS)
    parallel: dict[str, Any] = {"precision": precision}
    if config.parallel.reshard_after_forward is None:  # the small model would never need to
        parallel["reshard_after_forward"] = True
    if config.parallel.tile_tokens is not None:  # so that even the share of one rank in a small pack is cut
        parallel["tile_tokens"] = min(config.parallel.tile_tokens, TILE_TOKENS)
    train: dict[str, Any] = {"steps": 3, "epochs": None, "global_batch": world, "batch_tokens": None, "micro_batch": 1}
    train |= {"warmup_steps": 0, "warmup_ratio": 0.0}
    config = config.without_cache()
    return config.model_copy(
        update={
            "model": _with_adapter(shrink_model(config.model, probed.shrinking), config.model),
            "data": config.data.model_copy(update=data),
            "train": config.train.model_copy(update=train),
            "parallel": config.parallel.model_copy(update=parallel),
        }
    )


def _with_adapter(small: Model, model: Model) -> Model:
    """`small` with an adapter at the places of the model's own, whichever layers it has of them. No factor of it is
    zero, or the gradient of the other would be, on any layout."""
    if model.adapter is None:
        return small
    found = attached(build_model(model, "fp32"))
    assert found is not None
    names = dict(build_model(small.model_copy(update={"adapter": None}), "fp32").named_modules())
    there = [*names, *(f"{name}.{own}" for name, m in names.items() for own, _ in m.named_parameters(recurse=False))]

    def left(wanted: Iterable[str]) -> list[str]:
        patterns = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in wanted)
        return [pattern for pattern in patterns if any(matches(name, pattern) for name in there)]

    changes = {
        "targets": left((*found.modules, *found.experts)),
        "modules_to_save": left(found.saved),
        "exclude": [],
        "rank": min(found.settings.rank, RANK),
        "dropout": 0.0,
        "init": "random",
        "path": None,
    }
    return small.model_copy(update={"adapter": found.settings.model_copy(update=changes)})


def reads_media(model: Model) -> bool:
    if model.foundation is not None or is_own_module(model):
        return bool(model.modalities)
    recipe = own_recipe(model) or recipe_of(read_model_config(model).model_type)
    return recipe.modalities is not None
