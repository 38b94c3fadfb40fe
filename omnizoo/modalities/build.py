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
MAX_LAYERS = 10_000

# Raised by the constructors of transformers, torch and plugins for invalid arguments.
BUILDING_ERRORS = (*CODE_ERRORS, StrictDataclassError)


def explain(error: BaseException) -> str:
    """Return the message of an error in third-party code, and where it was raised, in one line."""
    if isinstance(error, StrictDataclassError):  # the first line names the check, and the last line states the problem
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
        built_in = ", ".join(BUILT_IN[role])
        raise UserError(
            f"{key}.kind: config.json names {kind}, which is not built in ({built_in}) and would import code. "
            f"If you trust this code, allow it with --allow-code {module} (in a config: model.allow_code: [{module}], "
            f"in Python: allow_code=[{module!r}])."
        )


def build_part(role: str, width: int, spec: dict[str, Any], key: str) -> Encoder | Decoder:
    """Build the encoder or decoder that `spec` describes.

    Modules that wrap a Hugging Face model also receive `config`, `folder` and `projector`, if they are set. Plugins are
    imported, so call `check_code` first if `spec` does not come from the user.

    Args:
        role: `encoder` or `decoder`.
        width: Width of the foundation.
        spec: Has the keys `kind`, `options`, `config`, `folder` and `projector`.
        key: Config key of the module, for error messages.
    """
    kind = spec["kind"]
    target = BUILT_IN[role].get(kind, kind)
    if ":" not in target:
        built_in = ", ".join(BUILT_IN[role])
        raise UserError(
            f"{key}.kind: {kind!r} is not a built-in {role}. "
            f"Use one of {built_in}, or `package.module:Class` for a plugin."
        )
    contract: type[Encoder | Decoder] = Encoder if role == "encoder" else Decoder
    cls = resolve_class(target, f"{key}.kind", contract, "a class that is called as Class(width, **options)")
    arguments = {name: spec[name] for name in RESERVED if spec.get(name) is not None}
    if "model_type" in arguments.get("config", {}):  # otherwise, the class of the module parses the config
        arguments["config"] = hf_config(arguments["config"], key)
    options = spec.get("options", {})
    arguments |= options

    check_call(cls, target, key, [width], arguments)
    _check_options(cls, options, f"{key}.options", is_built_in=kind in BUILT_IN[role])
    try:
        module: Encoder | Decoder = cls(width, **arguments)
    except UserError as error:
        starts_with_role = str(error).startswith((f"{role}.", f"{role}:", "projector."))
        if starts_with_role:  # extend the role to the full config key
            raise UserError(f"{key.removesuffix(role)}{error}") from error
        raise UserError(f"{key}: {error}") from error
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}: {target} raised an error when it was built: {explain(error)}") from error
    return module


def _check_options(cls: type, options: Mapping[str, Any], key: str, is_built_in: bool) -> None:
    """Check the options against the types that the class declares.

    Numeric options of built-in classes must be greater than 0.
    """
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        if "__init__" in vars(base):
            hints |= get_type_hints(vars(base)["__init__"])

    for name, value in options.items():
        if name in RESERVED:
            raise UserError(f"{key}.{name}: {name} is not an option. Move it out of options, one level up.")
        try:
            TypeAdapter(hints.get(name, Any), config=STRICT).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise UserError(f"{key}.{name}: {repr(value)[:60]} is not valid: {reason}") from error
        except PydanticUserError:  # pydantic cannot validate a type that a plugin defines
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        maximum = MAX_LAYERS if name == "layers" else LARGEST
        if is_built_in and is_number and not 0 < value <= maximum:
            raise UserError(
                f"{key}.{name}: {value} is out of range; expected a number greater than 0 and at most {maximum}"
            )


def hf_config(fields: dict[str, Any], key: str) -> PretrainedConfig:
    """Build a Hugging Face config from a mapping that contains `model_type`."""
    try:
        config: PretrainedConfig = AutoConfig.for_model(**fields)
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}.config: {explain(error)}") from error
    return config
