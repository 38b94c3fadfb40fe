"""Scale down a user's config until it can be verified on a CPU: a small model and small steps on the user's data."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.sections.train import BatchWarmup
from omnizoo.models.adapters.expert_matrices import expert_targets
from omnizoo.models.adapters.lora import attached, matches
from omnizoo.models.build import build_model
from omnizoo.models.diffusion.denoiser import is_denoiser, small_denoiser
from omnizoo.models.diffusion.samples import SampleSizes, pipeline_of
from omnizoo.models.hf_private import is_experts
from omnizoo.models.read_config import read_model_config
from omnizoo.models.recipe import recipe_from_config, recipe_of
from omnizoo.models.small_config import shrink_model
from omnizoo.models.user_module import is_own_module
from omnizoo.training.causality_probe import probe

PACK_TOKENS = 96  # maximum pack length
DENOISER_TOKENS = 50  # maximum number of tokens of the latents of a small sample
DENOISER_SAMPLES = 2  # minimum number of such samples in a pack
TILE_TOKENS = 7  # maximum `parallel.tile_tokens`; small enough to split each rank's tokens of a short pack
RANK = 4  # maximum rank of an adapter
SAMPLES_PER_RANK = 3  # with `train.samples_per_step`


def shrink(config: Config, world: int, precision: str) -> Config:
    """Return the config for `omnizoo verify`: `config` with a small random model and small steps for `world` ranks.

    Raises:
        UserError: If the model is not causal, attends across packed samples, cannot be probed on this host, or uses
            random numbers that its config cannot turn off.
    """
    if is_denoiser(config.model):
        return _shrink_denoiser(config, world, precision)
    probed = probe(config.model)
    if probed.unchecked:
        raise UserError(f"model: cannot be probed on this host: {probed.unchecked}")
    if probed.stubborn:
        raise UserError(
            "model: training uses random numbers (dropout, jitter) that depend on the layout, and that no field of the "
            "model config turns off. Verify the model without them."
        )
    data: dict[str, Any] = {"lanes": world, "workers": 0}
    if config.train.samples_per_step is None:
        data["look_ahead"] = 16
    # Packs keep their size if they contain media items or preference pairs, because these might not fit into smaller
    # packs.
    if not reads_media(config.model) and config.preference_pairs == "refused":
        data["pack_tokens"] = min(config.data.pack_tokens, PACK_TOKENS)
    small = _with_adapter(shrink_model(config.model, probed.shrinking), config.model)
    config = _with_small_steps(config.without_cache(), world, precision).changed(data=data)
    return config.model_copy(update={"model": small})


def _with_small_steps(config: Config, world: int, precision: str) -> Config:
    """Return `config` with three small steps for `world` ranks."""
    parallel: dict[str, Any] = {}
    if config.parallel.reshard_after_forward is None:  # by default, a small model would not be resharded
        parallel["reshard_after_forward"] = True
    if config.parallel.tile_tokens is not None:
        parallel["tile_tokens"] = min(config.parallel.tile_tokens, TILE_TOKENS)
    train: dict[str, Any] = {"steps": 3, "epochs": None, "warmup_steps": 0, "warmup_ratio": 0.0}
    train |= {"packs_per_step": world, "tokens_per_step": None, "micro_batch": 1, "precision": precision}
    if config.train.samples_per_step is not None:
        train["samples_per_step"] = SAMPLES_PER_RANK * world
    if config.train.batch_warmup is not None:  # the sizes of the three steps are 1/2, 3/4 and 1
        train["batch_warmup"] = BatchWarmup(steps=2, start=0.5)
    return config.changed(train=train, parallel=parallel)


def _shrink_denoiser(config: Config, world: int, precision: str) -> Config:
    """Return the config for a diffusion transformer. Its items and conditions are replaced by small random ones."""
    folder = pipeline_of(config.model)
    small = config.model.model_copy(
        update={"path": None, "config": small_denoiser(config.model), "pipeline": str(folder.path), "part": None}
    )
    pack_tokens = DENOISER_SAMPLES * (DENOISER_TOKENS + SampleSizes.of(config.model).small_text_tokens)
    data: dict[str, Any] = {"lanes": world, "workers": 0, "pack_tokens": pack_tokens, "text_dropout": 0.0}
    if config.train.samples_per_step is None:
        data["look_ahead"] = 16
    config = _with_small_steps(config, world, precision).changed(data=data)
    return config.model_copy(update={"model": _with_adapter(small, config.model)})


def _with_adapter(small: ModelSection, model: ModelSection) -> ModelSection:
    """Return `small` with an adapter on the same modules as in `model`, except modules that the small copy lacks.

    Both adapter matrices are randomly initialized. If one were zero, the gradient of the other would be zero for every
    layout, and nothing could be compared.
    """
    if model.adapter is None:
        return small
    adapter = attached(build_model(model, "fp32"))
    assert adapter is not None
    small_names = []
    small_model = build_model(small.model_copy(update={"adapter": None}), "fp32")
    for module_name, module in small_model.named_modules():
        small_names.append(module_name)
        names = expert_targets(module) if is_experts(module) else []
        small_names += [f"{module_name}.{target}" for target in names]

    def in_small_copy(names: Iterable[str]) -> list[str]:
        """Return patterns for `names`, with any layer number, that match a name of the small copy."""
        patterns = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
        return [pattern for pattern in patterns if any(matches(name, pattern) for name in small_names)]

    targets = in_small_copy((*adapter.modules, *adapter.experts))
    small_targets = [name for name in small_names if any(matches(name, pattern) for pattern in targets)]

    def in_small(values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values whose pattern matches a target of the small copy."""
        return {key: value for key, value in values.items() if any(matches(name, key) for name in small_targets)}

    changes = {
        "targets": targets,
        "modules_to_save": in_small_copy(adapter.saved),
        "exclude": [],
        "rank": min(adapter.settings.rank, RANK),
        "rank_pattern": {key: min(rank, RANK) for key, rank in in_small(adapter.settings.rank_pattern).items()},
        "alpha_pattern": in_small(adapter.settings.alpha_pattern),
        "dropout": 0.0,
        "init": "random",
        "path": None,
    }
    return small.model_copy(update={"adapter": adapter.settings.model_copy(update=changes)})


def reads_media(model: ModelSection) -> bool:
    """Whether the model has encoders or decoders for media."""
    if model.foundation is not None or is_own_module(model):
        return bool(model.modalities)
    recipe = recipe_from_config(model) or recipe_of(read_model_config(model).model_type)
    return recipe.modalities is not None
