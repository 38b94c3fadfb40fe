"""From a name in the config to a module: built-in encoders and decoders, or a class of the user's."""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from huggingface_hub.errors import StrictDataclassError
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from transformers import AutoConfig, PretrainedConfig

from omnizoo.config.doors import CODE_ERRORS, check_call, resolve_class
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
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
RESERVED = ("config", "folder", "projector")  # given by other keys
LARGEST = 2**31  # of the numbers that built-in parts take
MOST_LAYERS = 10_000

# What constructors raise for arguments that cannot be: of transformers, of torch, of a user's own class.
BUILDING_ERRORS = (*CODE_ERRORS, StrictDataclassError)


def explain(error: BaseException) -> str:
    """An error of somebody else's code in one line: what it says, and where it was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, StrictDataclassError):  # its first line names a check, the second says what is wrong
        return lines[-1] if lines else type(error).__name__
    said = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else said


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
    if ":" not in target:
        raise UserError(
            f"{key}.kind: {kind!r} is no built-in {role} ({', '.join(BUILT_IN[role])}); "
            "one of your own is `package.module:Class`"
        )
    contract: type[Encoder | Decoder] = Encoder if role == "encoder" else Decoder
    cls = resolve_class(target, f"{key}.kind", contract, "a class that is called as Class(width, **options)")
    given = {name: spec[name] for name in ("config", "folder", "projector") if spec.get(name) is not None}
    if "model_type" in given.get("config", {}):  # others are the class's own
        given["config"] = hf_config(given["config"], key)
    options = spec.get("options", {})
    given |= options
    check_call(cls, target, key, [width], given)
    _check_options(cls, options, f"{key}.options", is_built_in=kind in BUILT_IN[role])
    try:
        built: Encoder | Decoder = cls(width, **given)
    except UserError as error:  # a part knows its role, and not whose it is
        known = str(error).startswith((f"{role}.", f"{role}:", "projector."))
        raise UserError(f"{key.removesuffix(role)}{error}" if known else f"{key}: {error}") from error
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}: {target} cannot be built from this: {explain(error)}") from error
    return built


def _check_options(cls: type, options: Mapping[str, Any], key: str, is_built_in: bool) -> None:
    """Options against the types that the class declares; those of our own are sizes and rates, so above 0."""
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
        except PydanticUserError:  # a type of the user's own
            continue
        if not is_built_in or isinstance(value, bool):
            continue
        numbers = [value] if isinstance(value, int | float) else []
        if any(number <= 0 or number > (MOST_LAYERS if name == "layers" else LARGEST) for number in numbers):
            raise UserError(f"{key}.{name} is {value}; expected a number above 0 that a model can have")


def hf_config(fields: dict[str, Any], key: str) -> PretrainedConfig:
    """A Hugging Face config from a mapping with its `model_type`."""
    rest = dict(fields)
    model_type = rest.pop("model_type")
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **rest)
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}.config: {explain(error)}") from error
    return config
