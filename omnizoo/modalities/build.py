"""From a name in the config to a module: built-in encoders and decoders, or a class of the user's."""

from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Decoder, Encoder

BUILT_IN = {
    "encoder": {
        "vision": "omnizoo.modalities.image:VisionEncoder",
        "audio": "omnizoo.modalities.audio:AudioEncoder",
        "video": "omnizoo.modalities.video:VideoEncoder",
    },
    "decoder": {
        "image_tokens": "omnizoo.modalities.codes:ImageCodes",
        "audio_codec": "omnizoo.modalities.codec:AudioCodec",
        "flow": "omnizoo.modalities.flow:FlowHead",
    },
}


def check_code(role: str, kind: str, key: str, allowed: Sequence[str]) -> None:
    """Refuse to import what a folder names and the user does not allow; nothing is imported to find out."""
    module, colon, _ = kind.partition(":")
    if kind in BUILT_IN[role] or not colon:
        return
    if not any(module == name or module.startswith(f"{name}.") for name in allowed if name):
        raise UserError(
            f"{key}.kind: its config.json would have {kind} imported, which is code and not one of OmniZoo's own "
            f"({', '.join(BUILT_IN[role])}); if you trust it, allow it: --allow-code {module} (in a config "
            f"model.allow_code: [{module}], in Python allow_code=[{module!r}])"
        )


def build_part(role: str, width: int, spec: dict[str, Any], key: str) -> Encoder | Decoder:
    """The encoder or decoder that `spec` (kind, options, config, folder, projector) describes; `key` is its name.

    What is built around a Hugging Face model also gets `config`, `folder` and `projector`, as far as they are given.
    A class of the user's is imported: see `check_code` for a `spec` that is not the user's own.
    """
    kind = spec["kind"]
    target = BUILT_IN[role].get(kind, kind)
    module, colon, name = target.partition(":")
    if not colon:
        raise UserError(
            f"{key}.kind: {kind!r} is no built-in {role} ({', '.join(BUILT_IN[role])}); "
            "one of your own is `package.module:Class`"
        )
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{key}.kind: cannot import {target}: {error}") from error
    contract: type[Encoder | Decoder] = Encoder if role == "encoder" else Decoder
    if not (isinstance(cls, type) and issubclass(cls, contract)):
        raise UserError(f"{key}.kind: {target} is not a subclass of omnizoo.modalities.base.{contract.__name__}")
    given = {name: spec[name] for name in ("config", "folder", "projector") if spec.get(name) is not None}
    if "model_type" in given.get("config", {}):  # others are the class's own
        given["config"] = hf_config(given["config"], key)
    given |= spec.get("options", {})
    try:
        signature(cls).bind(width, **given)
    except TypeError as error:
        raise UserError(f"{key}: {target} does not take what it is given: {error}") from error
    built: Encoder | Decoder = cls(width, **given)
    return built


def hf_config(fields: dict[str, Any], key: str) -> PretrainedConfig:
    """A Hugging Face config from a mapping with its `model_type`."""
    rest = dict(fields)
    model_type = rest.pop("model_type")
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **rest)
    except (ValueError, TypeError) as error:
        raise UserError(f"{key}.config: {str(error).splitlines()[0]}") from error
    return config
