"""Base class of all config sections, value types, and Python objects as values."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, model_validator

MAX_TEXT_LENGTH = 4096  # characters; the maximum length of paths on Linux
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_LENGTH)]
LearningRate = Annotated[float, Field(gt=0, le=1000)]
LossWeight = Annotated[float, Field(ge=0, le=1e6)]
WeightDecay = Annotated[float, Field(ge=0, le=1000)]
Count = Annotated[int, Field(ge=1, le=2**20)]  # number of ranks, or of packs in a step
Steps = Annotated[int, Field(ge=0, le=10**12)]
PositiveInt = Annotated[int, Field(ge=1, le=10**12)]


def _check_identifier(value: str) -> str:
    """Return `value` if it is a valid metric name."""
    if not value.isidentifier():
        raise ValueError(f"{value!r} is not a valid name of a metric. Use letters, digits and _.")
    return value


MetricName = Annotated[str, Field(min_length=1, max_length=80), AfterValidator(_check_identifier)]


@dataclass(frozen=True, eq=False)
class PythonObject:
    """An object that was passed to `omnizoo.train`. A saved config contains its name instead."""

    value: Any = field(repr=False)
    name: str


def to_plain(value: Any) -> Any:
    """Return the name of a `PythonObject`, and any other value unchanged."""
    return value.name if isinstance(value, PythonObject) else value


Object = Annotated[Text | PythonObject | None, PlainSerializer(to_plain)]


def alternatives(*groups: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return, for each key of mutually exclusive groups of keys, the keys of all other groups."""
    exclusive: dict[str, tuple[str, ...]] = {}
    for group in groups:
        others = [key for other in groups if other != group for key in other]
        exclusive |= dict.fromkeys(group, tuple(others))
    return exclusive


class ConfigSection(BaseModel):
    """A frozen group of keys. Unknown keys are errors, and types are strict."""

    # Keys that cannot be set together with a key. On the command line, a key replaces those of the file.
    exclusive: ClassVar[dict[str, tuple[str, ...]]] = {}

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        arbitrary_types_allowed=True,  # for `PythonObject`
        use_attribute_docstrings=True,  # strings below fields are the descriptions of keys
    )

    @model_validator(mode="before")
    @classmethod
    def _unset_nulls(cls, value: Any) -> Any:
        """Remove keys that are null and have a default."""
        if not isinstance(value, dict):
            return value
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {key: item for key, item in value.items() if item is not None or key not in optional}


class NamedSettings(ConfigSection):
    """Settings that can be abbreviated to the text of `kind`."""

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class SubmoduleSettings(ConfigSection):
    """Settings of a submodule that has its own weights."""

    exclusive: ClassVar[dict[str, tuple[str, ...]]] = alternatives(("path",), ("config",))

    path: Text | None = None
    """HF folder with pretrained weights, or `ORG/NAME` on the Hugging Face Hub"""

    config: Text | dict[str, Any] | None = None
    """HF folder or `ORG/NAME` on the hub, or inline mapping with `model_type`, for random initialization from
    `train.seed`"""

    freeze: bool = False
    """whether the weights stay fixed; default: trained"""

    lr: LearningRate | None = None
    """peak learning rate; default: `train.lr`"""

    dtype: Literal["fp32", "bf16"] | None = None
    """dtype of the weights, for frozen submodules only; default: that of the model"""

    recompute: Literal["none", "full", "selective"] | None = None
    """activations to recompute in backward; default: `parallel.recompute`"""

    @model_validator(mode="after")
    def _check_weight_source(self) -> "SubmoduleSettings":
        if self.path is not None and self.config is not None:
            raise ValueError(
                "path and config are both set. Keep path for pretrained weights, or config for random initialization."
            )
        if isinstance(self.config, dict) and "model_type" not in self.config:
            raise ValueError("config has no `model_type`. Add it; arguments of a plugin class belong to `options`.")
        return self
