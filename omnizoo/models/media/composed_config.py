"""The Hugging Face config of a composed model, and its checks."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, PretrainedConfig

from omnizoo.config.errors import UserError
from omnizoo.modalities.build import check_code

ROLES = ("encoder", "decoder")
MARKS = ("begin", "placeholder", "end")
NEVER_FROM_FILES = ("allow_code", "is_own", "_name_or_path")


class OmniConfig(PretrainedConfig):
    """Config of a composed model.

    `foundation` is the config of the language model. `modalities` maps names to {encoder, decoder, marks}, as plain
    mappings.

    Two attributes are set by the caller and never read from a file. `allow_code` lists modules, in addition to
    OmniZoo's, that the config may name as encoders and decoders (`from_pretrained(folder, allow_code=["my_package"])`).
    `is_own` is True for the user's config. This config may name any module and any folder.
    """

    model_type = "omnizoo"
    sub_configs = {"foundation": AutoConfig}  # noqa: RUF012 - as transformers declares it
    allow_code = cast(tuple[str, ...], ())  # not annotated, because transformers would then save it as a field
    is_own = False

    def __init__(
        self,
        foundation: dict[str, Any] | PretrainedConfig | None = None,
        modalities: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(foundation, dict):
            fields = dict(foundation)
            foundation = AutoConfig.for_model(fields.pop("model_type", None), **fields)
        self.foundation = foundation
        self.modalities = check_description(modalities or {})
        # Ignore these fields, because otherwise a file could allow its own code.
        super().__init__(**{key: value for key, value in kwargs.items() if key not in NEVER_FROM_FILES})

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        return self.foundation if self.foundation is not None else self

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in NEVER_FROM_FILES}

    def parts(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield (modality, role, description) of each component after checking that it may be built.

        Its `folder` is resolved to a path that can be opened.
        """
        if self.foundation is None:
            raise UserError(
                "foundation: not set. Set `foundation` in the config of a composed model to the config of its language "
                "model."
            )
        for name, modality in self.modalities.items():
            for role in ROLES:
                part = modality.get(role)
                if not part:
                    continue
                key = f"model.modalities.{name}.{role}"
                if not self.is_own:
                    check_code(role, part["kind"], key, self.allow_code)
                    check_folder(part, key)
                if part.get("folder"):  # relative to the model folder, if saved with the model
                    part = part | {"folder": str(Path(self.name_or_path or "") / part["folder"])}
                yield name, role, part


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the foundation if `config` describes a composed model, otherwise `config` unchanged."""
    language: PretrainedConfig = config.get_text_config() if isinstance(config, OmniConfig) else config
    return language


def check_description(modalities: Any) -> dict[str, Any]:
    """Check the structure of `modalities` from a config.json, and return `modalities`."""
    if not isinstance(modalities, dict):
        raise UserError(
            f"modalities: the value has type {type(modalities).__name__}; expected a mapping of names to "
            "{encoder, decoder, marks}"
        )
    for name, modality in modalities.items():
        marks = modality.get("marks") if isinstance(modality, dict) else None
        if not isinstance(marks, dict) or set(marks) != set(MARKS) or not _are_texts(marks.values()):
            raise UserError(
                f"modalities.{name}.marks: the value is not valid; expected a mapping with exactly the keys "
                f"{', '.join(MARKS)}, whose values are strings"
            )
        for role in ROLES:
            _check_component(modality.get(role), f"modalities.{name}.{role}")
    return modalities


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _check_component(part: Any, key: str) -> None:
    """Check the structure of an encoder or decoder in a config.json. `key` is its key, for messages."""
    if part is None:
        return
    if not isinstance(part, dict) or not isinstance(part.get("kind"), str):
        raise UserError(f"{key}.kind: missing; expected the name of an encoder or decoder class")
    field_types = {"options": dict, "config": dict, "folder": str, "projector": dict}
    for field, expected in field_types.items():
        value = part.get(field)
        if value is not None and not isinstance(value, expected):
            raise UserError(f"{key}.{field}: the value has type {type(value).__name__}; expected {expected.__name__}")


def check_folder(part: dict[str, Any], key: str) -> None:
    """Check that the folders of a component are inside the model folder."""
    folders = [part.get("folder"), (part.get("options") or {}).get("folder")]
    for folder in folders:
        if folder and (Path(folder).is_absolute() or ".." in Path(folder).parts):
            raise UserError(
                f"{key}.folder: config.json contains {folder}, which is outside the model folder. Move the files into "
                "the model folder, and use a relative path."
            )
