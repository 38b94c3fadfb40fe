"""Read a pipeline folder of diffusers: `model_index.json`, and the components that it lists.

Folders are data: classes come from the installed diffusers and transformers only, and weights from safetensors only.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.modalities.frozen_tokenizer import diffusers_package
from omnizoo.models.untrusted_folders import check_numbers, check_settings, read_json, shorten, weight_files

INDEX = "model_index.json"
DENOISERS = ("transformer", "transformer_2")
CONFIG_FILES = ("scheduler_config.json", "config.json", "preprocessor_config.json", "tokenizer_config.json")
DIFFUSERS_STEM = "diffusion_pytorch_model"  # name of safetensors files of diffusers, without suffix


@dataclass(frozen=True)
class Component:
    """One entry of `model_index.json`: a model, scheduler, tokenizer or processor in a folder."""

    name: str
    library: str  # `diffusers`, `transformers`, or a module of `diffusers.pipelines`
    class_name: str
    folder: Path
    key: str  # config key of the pipeline, for messages

    @cached_property
    def config(self) -> dict[str, Any]:
        """The fields of the component's JSON file."""
        files = [self.folder / name for name in CONFIG_FILES]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise UserError(f"{self.key}: {self.folder} has none of {', '.join(CONFIG_FILES)}")
        fields = read_json(file)
        check_numbers(fields, f"{self.key}: {file}")
        return fields

    def load_class(self) -> Any:
        """Return the class of the component, without reading weights."""
        package = self.library
        if package not in ("diffusers", "transformers"):
            package = f"diffusers.pipelines.{package}"
        loaded = getattr(import_module(package), self.class_name, None)
        if not isinstance(loaded, type) or not hasattr(loaded, "from_pretrained"):
            raise UserError(f"{self.key}: {INDEX}: {self.name}: {self.library}.{self.class_name} is not a component")
        return loaded

    def weight_files(self) -> list[Path]:
        """Return the safetensors files of the component, after checking their headers."""
        stem = "model" if self.library == "transformers" else DIFFUSERS_STEM
        return weight_files(self.folder, self.key, stem)


@dataclass(frozen=True)
class PipelineFolder:
    """The parsed `model_index.json` of a pipeline folder."""

    path: Path
    class_name: str  # class of the pipeline, such as `WanPipeline`
    components: Mapping[str, Component]
    settings: Mapping[str, Any]  # fields that are not components, such as `boundary_ratio`
    key: str  # config key of the folder, for messages

    @classmethod
    def read(cls, path: str | Path, key: str = "model.path") -> "PipelineFolder":
        """Read the index of a local folder and check its components, without reading weights.

        Args:
            path: The folder. Names of repositories must be resolved before (`omnizoo.config.hub.local_path`).
            key: Config key of the folder, for messages.

        Raises:
            UserError: If a file is missing, a class is unknown, or a component needs code from the folder.
        """
        folder = Path(path)
        index_file = folder / INDEX
        if not index_file.is_file():
            raise UserError(f"{key}: {folder} has no {INDEX}; expected a pipeline folder of diffusers")
        index = read_json(index_file)
        class_name = index.get("_class_name")
        package = diffusers_package(str(class_name))
        if not isinstance(class_name, str) or class_name not in dir(package):
            raise UserError(
                f"{key}: {index_file}: _class_name: the installed diffusers {package.__version__} has no pipeline "
                f"{shorten(class_name)}. Use a pipeline of diffusers, or upgrade diffusers."
            )

        components: dict[str, Component] = {}
        settings: dict[str, Any] = {}
        for name, value in index.items():
            if name.startswith("_"):
                continue
            if not _is_component(value):
                settings[name] = value
            elif value[0] is not None:
                components[name] = _component(folder, name, value[0], value[1], key)
        return cls(path=folder, class_name=class_name, components=components, settings=settings, key=key)

    def component(self, name: str) -> Component:
        """Return a component. Raise a `UserError` if the pipeline does not have it."""
        if name not in self.components:
            listed = ", ".join(self.components)
            raise UserError(f"{self.key}: {self.path / INDEX} has no component `{name}`; it has {listed}")
        return self.components[name]

    @cached_property
    def denoisers(self) -> dict[str, Component]:
        """The transformers that can be trained, keyed by component name. A pair has one per range of noise."""
        found = {name: self.components[name] for name in DENOISERS if name in self.components}
        if not found:
            raise UserError(
                f"{self.key}: {self.path / INDEX} has no component `{DENOISERS[0]}`; it has "
                f"{', '.join(self.components)}. Use a pipeline whose model is a transformer."
            )
        for component in found.values():
            configured = component.config.get("_class_name")
            if configured != component.class_name:
                raise UserError(
                    f"{self.key}: {component.folder}/config.json: _class_name: {shorten(configured)} disagrees with "
                    f"{component.class_name} in {INDEX}"
                )
        return found

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """The fields of `scheduler_config.json`."""
        return self.component("scheduler").config

    @property
    def vae_config(self) -> dict[str, Any]:
        """The config of the autoencoder `vae`."""
        return self.component("vae").config

    @property
    def pipeline_class(self) -> Any:
        """The class of the pipeline."""
        return getattr(diffusers_package(self.class_name), self.class_name)


def is_pipeline_folder(path: str | Path) -> bool:
    """Whether a folder contains the index of a pipeline."""
    return os.path.isfile(Path(path) / INDEX)


def _is_component(value: Any) -> bool:
    """Whether a value of the index is a component: two entries, library and class."""
    return (
        isinstance(value, list) and len(value) == 2 and all(entry is None or isinstance(entry, str) for entry in value)
    )


def _component(folder: Path, name: str, library: str, class_name: Any, key: str) -> Component:
    """Return the checked component `name` of a pipeline."""
    source = f"{key}: {folder / INDEX}: {name}"
    if not name.isidentifier() or not library.isidentifier() or not isinstance(class_name, str):
        raise UserError(f"{source}: [{shorten(library)}, {shorten(class_name)}] is not a library and a class")
    module = library if library in ("diffusers", "transformers") else f"diffusers.pipelines.{library}"
    if find_spec(module) is None or class_name not in dir(import_module(module)):
        raise UserError(
            f"{source}: the installed {module.partition('.')[0]} has no {shorten(class_name)} in `{library}`. Code of "
            "a folder does not run: use components of diffusers and transformers, or upgrade them."
        )
    subfolder = folder / name
    if not subfolder.is_dir():
        raise UserError(f"{source}: {subfolder} is not a folder. Download the complete pipeline.")
    check_settings(subfolder, trust_remote_code=False, key=source)
    return Component(name=name, library=library, class_name=class_name, folder=subfolder, key=key)
