"""Build encoders and decoders from their names in the config: built-in classes or plugins."""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from huggingface_hub.errors import StrictDataclassError
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from transformers import AutoConfig, PretrainedConfig

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import CODE_ERRORS, check_call, resolve_class
from omnizoo.modalities.base import Decoder, Encoder

BUILT_IN = {
    "encoder": {
        "vision": "omnizoo.modalities.encoders.image:VisionEncoder",
        "audio": "omnizoo.modalities.encoders.audio:AudioEncoder",
        "video": "omnizoo.modalities.encoders.video:VideoEncoder",
    },
    "decoder": {
        "image_tokens": "omnizoo.modalities.decoders.image_tokens:ImageCodes",
        "audio_codec": "omnizoo.modalities.decoders.audio_codec:AudioCodec",
        "flow": "omnizoo.modalities.decoders.flow:FlowHead",
    },
}
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
RESERVED = ("config", "folder", "projector")  # set by separate config keys, not by options
LARGEST = 2**31  # upper bound of numeric options of built-in modules
MOST_LAYERS = 10_000

# Raised by the constructors of transformers, torch and plugins for invalid arguments.
BUILDING_ERRORS = (*CODE_ERRORS, StrictDataclassError)


def explain(error: BaseException) -> str:
    """Return the message of an error in third-party code, and where it was raised, in one line."""
    if isinstance(error, StrictDataclassError):  # the first line names the check, the last one states the problem
        return str(error).strip().rpartition("\n")[2].strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return named_line(error) + place


def check_code(role: str, kind: str, key: str, allowed: Sequence[str]) -> None:
    """Raise a `UserError` if a model folder names a plugin that the user does not allow. Imports nothing."""
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
    """Build the encoder or decoder that `spec` describes.

    Modules around a Hugging Face model also receive `config`, `folder` and `projector`, if they are set. A plugin is
    imported: call `check_code` first if `spec` does not come from the user.

    Args:
        role: `encoder` or `decoder`.
        width: Width of the foundation.
        spec: Has the keys `kind`, `options`, `config`, `folder` and `projector`.
        key: Config key of the module, for error messages.
    """
    kind = spec["kind"]
    target = BUILT_IN[role].get(kind, kind)
    if ":" not in target:
        raise UserError(
            f"{key}.kind: {kind!r} is no built-in {role} ({', '.join(BUILT_IN[role])}); "
            "one of your own is `package.module:Class`"
        )
    contract: type[Encoder | Decoder] = Encoder if role == "encoder" else Decoder
    cls = resolve_class(target, f"{key}.kind", contract, "a class that is called as Class(width, **options)")
    given = {name: spec[name] for name in ("config", "folder", "projector") if spec.get(name) is not None}
    if "model_type" in given.get("config", {}):  # without it, the class parses the config
        given["config"] = hf_config(given["config"], key)
    options = spec.get("options", {})
    given |= options
    check_call(cls, target, key, [width], given)
    _check_options(cls, options, f"{key}.options", is_built_in=kind in BUILT_IN[role])
    try:
        built: Encoder | Decoder = cls(width, **given)
    except UserError as error:  # the message starts with the role; complete it to the config key
        known = str(error).startswith((f"{role}.", f"{role}:", "projector."))
        raise UserError(f"{key.removesuffix(role)}{error}" if known else f"{key}: {error}") from error
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}: {target} cannot be built from this: {explain(error)}") from error
    return built


def _check_options(cls: type, options: Mapping[str, Any], key: str, is_built_in: bool) -> None:
    """Check the options against the types that the class declares.

    Numeric options of built-in classes must be above 0.
    """
    declared = [vars(base)["__init__"] for base in reversed(cls.__mro__[:-1]) if "__init__" in vars(base)]
    hints = {name: hint for init in declared for name, hint in get_type_hints(init).items()}
    for name, value in options.items():
        if name in RESERVED:
            raise UserError(f"{key}.{name}: is no option; it is a key of its own, next to options")
        try:
            TypeAdapter(hints.get(name, Any), config=STRICT).validate_python(value)
        except ValidationError as error:
            wanted = error.errors()[0]["msg"].lower()
            raise UserError(f"{key}.{name} is {repr(value)[:60]}; {wanted}") from error
        except PydanticUserError:  # pydantic cannot validate a type that a plugin defines
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_built_in and is_number and not 0 < value <= (MOST_LAYERS if name == "layers" else LARGEST):
            raise UserError(f"{key}.{name} is {value}; expected a number above 0 that a model can have")


def hf_config(fields: dict[str, Any], key: str) -> PretrainedConfig:
    """Build a Hugging Face config from a mapping that contains `model_type`."""
    try:
        config: PretrainedConfig = AutoConfig.for_model(**fields)
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}.config: {explain(error)}") from error
    return config
