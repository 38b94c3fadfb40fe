"""The Hugging Face config of a composed model, and its checks."""

from collections.abc import Iterator
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
    `is_own` is True for the user's config, which may name any module and any folder.
    """

    model_type = "omnizoo"
    sub_configs = {"foundation": AutoConfig}  # noqa: RUF012 - as transformers declares it
    allow_code = cast(tuple[str, ...], ())  # with an annotation, transformers would save it as a field
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
        # Ignore these fields: otherwise a file could allow its own code.
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
            raise UserError("a composed model needs a foundation: the config of its language model")
        for name, spec in self.modalities.items():
            for role in ROLES:
                if part := spec.get(role):
                    key = f"model.modalities.{name}.{role}"
                    if not self.is_own:
                        check_code(role, part["kind"], key, self.allow_code)
                        check_folder(part, key)
                    if part.get("folder"):  # relative to the model folder, if saved with the model
                        part = part | {"folder": str(Path(self.name_or_path or "") / part["folder"])}
                    yield name, role, part


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the foundation of a composed model, or else `config` unchanged."""
    language: PretrainedConfig = config.get_text_config() if isinstance(config, OmniConfig) else config
    return language


def check_description(modalities: Any) -> dict[str, Any]:
    """Check the structure of `modalities` in a config.json, and return them."""
    wanted = "modalities of a composed model: a mapping of names to {encoder, decoder, marks} was expected"
    if not isinstance(modalities, dict):
        raise UserError(f"{wanted}, not {type(modalities).__name__}")
    for name, spec in modalities.items():
        marks = spec.get("marks") if isinstance(spec, dict) else None
        if (
            not isinstance(marks, dict)
            or set(marks) != set(MARKS)
            or not all(isinstance(m, str) for m in marks.values())
        ):
            raise UserError(f"{wanted}; `marks` of {name!r} must be the texts {', '.join(MARKS)}")
        for role in ROLES:
            part = spec.get(role)
            if part is not None and not (isinstance(part, dict) and isinstance(part.get("kind"), str)):
                raise UserError(f"{wanted}; the {role} of {name!r} has no kind")
            given = part or {}
            kinds = {"options": dict, "config": dict, "folder": str, "projector": dict}
            for key, kind in kinds.items():
                if given.get(key) is not None and not isinstance(given[key], kind):
                    raise UserError(f"{wanted}; {role}.{key} of {name!r} is not a {kind.__name__}")
    return modalities


def check_folder(part: dict[str, Any], key: str) -> None:
    """Check that the folders of a component are inside the model folder."""
    folders = [part.get("folder"), (part.get("options") or {}).get("folder")]
    for folder in folders:
        if folder and (Path(folder).is_absolute() or ".." in Path(folder).parts):
            raise UserError(f"{key}.folder: its config.json names {folder}, which is outside of the model's folder")
