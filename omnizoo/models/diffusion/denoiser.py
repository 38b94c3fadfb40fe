"""Build diffusion transformers from pipeline folders, transformer folders and inline configs, without weights."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.hub import local_path
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.build import BUILDING_ERRORS, explain
from omnizoo.modalities.frozen_tokenizer import diffusers_package
from omnizoo.models.diffusion.expert_pair import EXPERTS, ExpertPair
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder, is_pipeline_folder
from omnizoo.models.diffusion.recipe import (
    COMPRESSION,
    DENOISER,
    Config,
    Shape,
    denoiser_recipe,
    diffusion_recipe_of,
)
from omnizoo.models.diffusion.split import split_tokens
from omnizoo.models.untrusted_folders import check_numbers, read_json
from omnizoo.models.weights.recording import recording

CLASS = "_class_name"
BOUNDARY = "boundary_ratio"
CONFIG = "_omnizoo_config"  # attribute of a transformer that stores its config, with the name of its class
NOISE_RANGE = "_omnizoo_noise_range"  # attribute of a model: the noise shares on which it is trained


@dataclass(frozen=True)
class DenoiserSource:
    """The transformers that a model section describes."""

    configs: Mapping[str, dict[str, Any]]  # config fields by component name
    folders: Mapping[str, Path]  # folders with weights, by component name; empty for a random initialization
    pipeline: PipelineFolder | None
    boundary: float | None  # noise share from which a pair uses its first transformer
    key: str  # config key, for messages

    @property
    def is_pair(self) -> bool:
        return len(self.configs) > 1

    @property
    def class_name(self) -> str:
        """Class of the transformers."""
        return str(next(iter(self.configs.values()))[CLASS])

    @property
    def config(self) -> dict[str, Any]:
        """The config of the (first) transformer."""
        return next(iter(self.configs.values()))


def is_denoiser(model: ModelSection) -> bool:
    """Whether a model section describes a diffusion transformer."""
    if model.module is not None or model.given is not None or model.foundation is not None:
        return False
    if isinstance(model.config, dict):
        return CLASS in model.config
    folder = Path(local_path(str(model.path or model.config)))
    if is_pipeline_folder(folder):
        return True
    file = folder / "config.json"
    return file.is_file() and CLASS in read_json(file)


def read_denoiser(model: ModelSection) -> DenoiserSource:
    """Read the configs of the transformers of a model section.

    Raises:
        UserError: If the folder or the config cannot be used.
    """
    if isinstance(model.config, dict):
        return _from_fields(dict(model.config), model)
    key = "model.path" if model.path else "model.config"
    folder = Path(local_path(str(model.path or model.config)))
    if not is_pipeline_folder(folder):
        config = read_json(folder / "config.json")
        check_numbers(config, f"{key}: {folder}/config.json")
        _check_no_part(model, key)
        folders = {EXPERTS[0]: folder} if model.path else {}
        return DenoiserSource({EXPERTS[0]: config}, folders, pipeline=None, boundary=None, key=key)

    pipeline = PipelineFolder.read(folder, key)
    components = dict(pipeline.denoisers)
    boundary = pipeline.settings.get(BOUNDARY)
    if len(components) > 1 and boundary is None:
        raise UserError(
            f"{key}: {folder} has two transformers, but model_index.json has no {BOUNDARY}. Set model.part to "
            f"{' or '.join(components)} to train one of them."
        )
    if model.part is not None:
        if model.part not in components:
            raise UserError(f"model.part: the pipeline has no {model.part!r}; it has {', '.join(components)}")
        components = {model.part: components[model.part]}
    configs = {name: component.config for name, component in components.items()}
    folders = {name: component.folder for name, component in components.items()} if model.path else {}
    return DenoiserSource(configs, folders, pipeline, None if boundary is None else float(boundary), key)


def _from_fields(fields: dict[str, Any], model: ModelSection) -> DenoiserSource:
    """Return the source of an inline config. With `boundary_ratio`, it describes a pair of equal transformers."""
    _check_no_part(model, "model.config")
    boundary = fields.pop(BOUNDARY, None)
    check_numbers(fields, "model.config")
    model_class = _class_of(fields, "model.config")
    known = inspect.signature(model_class.__init__).parameters
    unknown = [name for name in fields if name not in known and not name.startswith("_")]
    if unknown:
        raise UserError(f"model.config.{unknown[0]}: {fields[CLASS]} has no such field. Remove it.")
    if boundary is None:
        return DenoiserSource({EXPERTS[0]: fields}, {}, pipeline=None, boundary=None, key="model.config")
    return DenoiserSource(dict.fromkeys(EXPERTS, fields), {}, None, float(boundary), "model.config")


def _check_no_part(model: ModelSection, key: str) -> None:
    if model.part is not None:
        raise UserError(f"model.part: {model.part!r} has no effect, because {key} is a single transformer. Remove it.")


def _class_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the class of a transformer, which must have a recipe."""
    class_name = str(config.get(CLASS))
    recipe = diffusion_recipe_of(class_name, key)
    for name, reason in recipe.unsupported.items():
        if config.get(name):
            raise UserError(f"{key}: {class_name} with {name}: {config[name]}: {reason}. Use another model.")
    package = diffusers_package(class_name)
    model_class = getattr(package, class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, package.ModelMixin)):
        raise UserError(f"{key}: the installed diffusers {package.__version__} has no {class_name}. Upgrade diffusers.")
    return model_class


def build_denoiser(model: ModelSection, device: str) -> nn.Module:
    """Build the unmodified transformer of a model section on `device`, usually meta; a pair as `ExpertPair`.

    Raises:
        UserError: If the section cannot be used, or its class has no recipe.
    """
    source = read_denoiser(model)
    transformers = [build_transformer(config, source.key, device) for config in source.configs.values()]
    built = transformers[0]
    low, high = 0.0, 1.0
    if source.is_pair:
        assert source.boundary is not None
        built = ExpertPair(transformers[0], transformers[1], source.boundary)
    elif source.boundary is not None and model.part is not None:
        low, high = (source.boundary, 1.0) if model.part == EXPERTS[0] else (0.0, source.boundary)
    recipe = diffusion_recipe_of(source.class_name, source.key)
    vars(built)[DENOISER] = recipe
    for module in transformers:
        if recipe.compression is not None and source.pipeline is not None:
            vars(module)[COMPRESSION] = recipe.compression(source.pipeline.vae_config)
    vars(built)[NOISE_RANGE] = low, high
    return built


def noise_range(model: nn.Module) -> tuple[float, float]:
    """Return the noise shares on which a transformer is trained. One expert of a pair has only its own range."""
    low, high = vars(model).get(NOISE_RANGE, (0.0, 1.0))
    return low, high


def build_transformer(config: Mapping[str, Any], key: str, device: str) -> nn.Module:
    """Build one transformer, without weights if the device is meta. `config` has the field `_class_name`."""
    model_class = _class_of(config, key)
    try:
        with recording() as record, torch.device(device):
            built: nn.Module = model_class.from_config(config)
    except UserError:
        raise
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}: cannot build a {config[CLASS]} from this config: {explain(error)}") from error
    # Constants that are neither parameters nor buffers would stay on meta, because nothing moves or fills them.
    for module in built.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                vars(module)[name] = record.value(value, seed=0)
    vars(built)[DENOISER] = diffusion_recipe_of(str(config[CLASS]), key)
    vars(built)[CONFIG] = config
    return built


def config_of_denoiser(model: nn.Module) -> Config:
    """Return the config of a transformer, or of the first one of a pair, with the field `_class_name`."""
    transformer = next(iter(transformers_of(model).values()))
    config: Config = vars(transformer)[CONFIG]
    return config


def transformers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the transformers of a denoiser by path: both of a pair, otherwise the model itself. Empty for others."""
    if isinstance(model, ExpertPair):
        return {name: model.get_submodule(name) for name in EXPERTS}
    return {} if denoiser_recipe(model) is None else {"": model}


def split_denoiser(model: nn.Module) -> None:
    """Prepare the transformers for sequence parallelism, before they are sharded.

    Raises:
        UserError: If the family does not support it.
    """
    for transformer in transformers_of(model).values():
        recipe = denoiser_recipe(transformer)
        assert recipe is not None
        if recipe.split is None:
            raise UserError(
                f"parallel.ulysses: {type(transformer).__name__} does not support sequence parallelism, because its "
                "layers mix tokens outside attention. Set parallel.ulysses: 1 and parallel.ring: 1."
            )
        split_tokens(transformer, recipe.split, recipe.trims_text)


def latent_tokens(config: Config, shape: Sequence[int]) -> int:
    """Return the number of tokens of latents `[C, F, H, W]` or `[C, H, W]`, for the config of a transformer."""
    frames, height, width = diffusion_recipe_of(str(config[CLASS])).grid(config, _with_frames(shape))
    return frames * height * width


def latent_channels(config: Config) -> int:
    """Return the number of channels of the noisy latents, for the config of a transformer."""
    return diffusion_recipe_of(str(config[CLASS])).channels(config)


def condition_shapes(config: Config, shape: Sequence[int], text_tokens: int) -> dict[str, Shape]:
    """Return the shape of each condition of one sample, for the config of a transformer."""
    recipe = diffusion_recipe_of(str(config[CLASS]))
    shapes = {}
    for name, fact in recipe.conditions.items():
        condition_shape = fact.shape(config, _with_frames(shape), text_tokens)
        if condition_shape is not None:
            has_frames = len(shape) == 4 or len(condition_shape) < 4
            shapes[name] = condition_shape if has_frames else (condition_shape[0], *condition_shape[2:])
    return shapes


def _with_frames(shape: Sequence[int]) -> Shape:
    """Return a shape `[C, F, H, W]`."""
    return tuple(shape) if len(shape) == 4 else (shape[0], 1, *shape[1:])


def small_denoiser(model: ModelSection) -> dict[str, Any]:
    """Return the inline config of a small copy. Channels and widths of conditions are those of the model."""
    source = read_denoiser(model)
    small = dict(diffusion_recipe_of(source.class_name, source.key).small_config)
    known = inspect.signature(_class_of(source.config, source.key).__init__).parameters
    fields = {name: value for name, value in source.config.items() if name in known}
    fields |= {CLASS: source.class_name, **small}
    return fields | ({BOUNDARY: source.boundary} if source.is_pair else {})
