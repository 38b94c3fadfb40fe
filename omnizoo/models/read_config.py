"""Read the Hugging Face config and tokenizer that a model section names."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from omnizoo.config.errors import UserError
from omnizoo.config.hub import local_path
from omnizoo.config.sections.base import PythonObject, SubmoduleSettings
from omnizoo.config.sections.model import EncoderSettings, ModalitySettings, ModelSection, ProjectorSettings
from omnizoo.modalities.build import BUILDING_ERRORS, explain
from omnizoo.models.check_config_fields import check_shape, config_of
from omnizoo.models.folder_kind import check_family, describe_config, describe_folder
from omnizoo.models.interfaces.score_head import describe_score_head
from omnizoo.models.media import composed as _registers_composed_models  # noqa: F401 - with transformers' auto classes
from omnizoo.models.media.composed_config import OmniConfig
from omnizoo.models.untrusted_folders import check_settings, read_json
from omnizoo.models.user_module import given_model
from omnizoo.models.weights.vocabulary import grow, may_grow


def read_model_config(model: ModelSection) -> Any:
    """Return the Hugging Face config of `model`. A vocabulary that may be resized is large enough for all tokens."""
    config = _read_described(model)
    folder = tokenizer_folder(model)
    has_tokenizer = isinstance(model.tokenizer, PythonObject) or (folder is not None and Path(folder).is_dir())
    # A missing tokenizer is an error only if `resize_vocabulary` is set.
    if may_grow(model) and (has_tokenizer or model.resize_vocabulary):
        grow(config, len(load_tokenizer(model)), model)
    if model.score_head is not None:
        describe_score_head(config, model.score_head, "model.path" if model.path else "model.config")
    return config


def _read_described(model: ModelSection) -> Any:
    """Return the Hugging Face config of `model`, with the published vocabulary size."""
    if model.given is not None:
        python_model = given_model(model)
        assert isinstance(python_model, PreTrainedModel)
        return deepcopy(python_model.config)
    if model.foundation is not None:
        foundation = _read_config(model.foundation, "model.foundation", model.trust_remote_code)
        modalities = {name: _describe(name, modality) for name, modality in model.modalities.items()}
        composed = OmniConfig(foundation=foundation, modalities=modalities)
        composed.is_own = True
        return composed

    config = _read_config(model, "model", model.trust_remote_code)
    if isinstance(config, OmniConfig):
        config.allow_code = tuple(model.allow_code)
        list(config.parts())  # raises if a component is not allowed, before other files of the folder are read
    if model.part is None:
        return config
    part = getattr(config, model.part, None)
    if not isinstance(part, PretrainedConfig):
        sub_configs = ", ".join(config.sub_configs) or "none"
        raise UserError(f"model.part: `{config.model_type}` has no {model.part!r}; its sub-configs: {sub_configs}")
    return part


def _describe(name: str, modality: ModalitySettings) -> dict[str, Any]:
    """Return a modality in the form that the config of a composed model stores."""
    marks = {"begin": f"<|{name}_begin|>", "placeholder": f"<|{name}_pad|>", "end": f"<|{name}_end|>"}
    described: dict[str, Any] = {"marks": marks | modality.marks.model_dump(exclude_none=True)}
    for role, part in (("encoder", modality.encoder), ("decoder", modality.decoder)):
        if part is not None:
            projector = modality.projector if role == "encoder" else None
            described[role] = _describe_part(part, projector, f"model.modalities.{name}.{role}")
    return described


def _describe_part(part: EncoderSettings, projector: ProjectorSettings | None, key: str) -> dict[str, Any]:
    """Return an encoder or decoder in the form that the config of a composed model stores."""
    folder = part.path or (part.config if isinstance(part.config, str) else None)
    folder = folder and local_path(folder)
    config = None
    if isinstance(part.config, dict) or (folder and (Path(folder) / "config.json").is_file()):
        try:
            config = _read_config(part, key, trust_remote_code=False).to_dict()
        except UserError:
            if part.config is not None:
                raise
            # The folder contains no transformers model. For example, it contains a diffusers tokenizer or a codebook.
            # The class of the component reads these files.
    return {
        "kind": part.kind,
        "options": part.options,
        "config": config,
        "folder": folder and str(Path(folder).resolve()),
        "projector": {**projector.options, "kind": projector.kind} if projector else None,
    }


def _read_config(model: ModelSection | SubmoduleSettings, section: str, trust_remote_code: bool) -> Any:
    """Return the Hugging Face config from `path` (a folder) or from `config` (a folder or an inline mapping)."""
    if isinstance(model.config, dict):
        return config_of(model.config, f"{section}.config")
    key = f"{section}.path" if model.path else f"{section}.config"
    folder = model.path or model.config
    assert isinstance(folder, str)
    is_on_hub = local_path(folder) != folder
    folder = local_path(folder)
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{key}: {folder} is not a transformers model: {describe_folder(Path(folder))}.")
    settings = check_settings(Path(folder), trust_remote_code, key, is_on_hub)
    model_type = settings.get("model_type")
    if not trust_remote_code:
        if not isinstance(model_type, str):
            raise UserError(f"{key}: {folder}/config.json: {describe_config(settings)}.")
        check_family(model_type, f"{key}: {folder}/config.json: model_type")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except UserError as error:
        raise UserError(f"{key}: {folder}/config.json: {error}") from error
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}: cannot read {folder}/config.json: {explain(error)}") from error
    check_shape(config, key)
    return config


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read `generation_config.json` from `folder`."""
    read_json(folder / "generation_config.json")
    try:
        return GenerationConfig.from_pretrained(folder)
    except BUILDING_ERRORS as error:
        raise UserError(f"{folder}/generation_config.json: cannot be read: {explain(error)}") from error


def tokenizer_folder(model: ModelSection) -> str | None:
    """Return the folder of the tokenizer: `model.tokenizer`, or the model folder. None if neither is a folder."""
    if model.tokenizer and not isinstance(model.tokenizer, PythonObject):
        return local_path(model.tokenizer)
    language_section = model.foundation or model
    folder = language_section.path or language_section.config
    return local_path(folder) if isinstance(folder, str) else None


def load_tokenizer(model: ModelSection) -> Any:
    """Load the Hugging Face tokenizer from `model.tokenizer` or, if this is not set, from the model folder.

    Args:
        model: The section `model` of the config.

    Returns:
        The tokenizer. For a composed model, it contains the marks of all modalities as special tokens.

    Raises:
        UserError: If the folder contains no tokenizer, or the tokenizer cannot be used.
    """
    if isinstance(model.tokenizer, PythonObject):
        return _given_tokenizer(model.tokenizer.value)
    folder = tokenizer_folder(model)
    if folder is None and model.given is not None:
        raise UserError(
            "model.tokenizer: not set. Set the folder of a Hugging Face tokenizer, or pass a tokenizer to "
            "omnizoo.train(tokenizer=...)."
        )
    if folder is None:
        raise UserError(
            "model.tokenizer: not set, and model.config is inline. Set the folder of a Hugging Face tokenizer."
        )
    if not Path(folder).is_dir():
        raise UserError(f"model.tokenizer: {folder} is not a folder")
    if model.tokenizer is None:
        _read_described(model)  # check the config first, because an error of AutoTokenizer would blame the tokenizer
    check_settings(Path(folder), model.trust_remote_code, "model.tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the tokenizers library raises plain `Exception`
        raise UserError(f"model.tokenizer: {folder} has no usable tokenizer: {explain(error)}") from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()):
        # Without tokenizer files, transformers silently creates an empty tokenizer of the family.
        raise UserError(f"model.tokenizer: {folder} has no tokenizer vocabulary, such as a tokenizer.json")

    if model.foundation is not None:
        marks: list[str] = []
        for name, modality in model.modalities.items():
            marks += _describe(name, modality)["marks"].values()
        tokenizer.add_special_tokens({"extra_special_tokens": marks}, replace_extra_special_tokens=False)
    return tokenizer


def _given_tokenizer(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer that was passed as a Python object."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(
            f"tokenizer=: the value has type {type(tokenizer).__name__}; expected a fast tokenizer of transformers"
        )
    return deepcopy(tokenizer)
