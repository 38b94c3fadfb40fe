"""Base classes of the config sections, and the types of values that several sections use."""

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
    """Return `value` unchanged if it is a valid metric name. Raises ValueError if it is not."""
    if not value.isidentifier():
        raise ValueError(f"{value!r} is not a valid name of a metric. Use letters, digits and _.")
    return value


MetricName = Annotated[str, Field(min_length=1, max_length=80), AfterValidator(_check_identifier)]


@dataclass(frozen=True, eq=False)
class PythonObject:
    """A Python object that was passed to `omnizoo.train`, as the value of a config key.

    A saved config contains the name of the object, because the object itself cannot be written as YAML.
    """

    value: Any = field(repr=False)
    name: str


def to_plain(value: Any) -> Any:
    """Return the name of a `PythonObject`, and any other value unchanged."""
    return value.name if isinstance(value, PythonObject) else value


Object = Annotated[Text | PythonObject | None, PlainSerializer(to_plain)]


def alternatives(*groups: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Build a value for `ConfigSection.exclusive` from groups of keys of which only one group may be set.

    `alternatives(("path",), ("rows", "options"))` returns
    `{"path": ("rows", "options"), "rows": ("path",), "options": ("path",)}`.

    Args:
        groups: Groups of keys. Keys of the same group can be set together.

    Returns:
        For each key, the keys that cannot be set together with it.
    """
    exclusive: dict[str, tuple[str, ...]] = {}
    for group in groups:
        others = [key for other in groups if other != group for key in other]
        exclusive |= dict.fromkeys(group, tuple(others))
    return exclusive


class ConfigSection(BaseModel):
    """Base class of all groups of config keys.

    A section is immutable. An unknown key is an error, and a value of the wrong type is not converted.
    """

    # For each key, the keys that cannot be set together with it. A key on the command line replaces such keys of the
    # config file.
    exclusive: ClassVar[dict[str, tuple[str, ...]]] = {}

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        arbitrary_types_allowed=True,  # needed for `PythonObject`
        use_attribute_docstrings=True,  # the string below a field is the description of the key
    )

    @model_validator(mode="before")
    @classmethod
    def _unset_nulls(cls, value: Any) -> Any:
        """Remove optional keys whose value is null, so that they get their default."""
        if not isinstance(value, dict):
            return value
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {key: item for key, item in value.items() if item is not None or key not in optional}


class NamedSettings(ConfigSection):
    """Settings with a key `kind`. A config may contain the value of `kind` as text instead of a mapping."""

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, value: Any) -> Any:
        """Convert a text to a mapping with the key `kind`."""
        return {"kind": value} if isinstance(value, str) else value


class SubmoduleSettings(ConfigSection):
    """Settings of a submodule that has its own weights."""

    exclusive: ClassVar[dict[str, tuple[str, ...]]] = alternatives(("path",), ("config",))

    path: Text | None = None
    """Pretrained weights: a Hugging Face model folder, or `ORG/NAME` on the Hugging Face Hub."""

    config: Text | dict[str, Any] | None = None
    """Model config to initialize randomly from `train.seed`, instead of `path`: a Hugging Face model folder, `ORG/NAME`
    on the hub, or a mapping with `model_type`."""

    freeze: bool = False
    """Whether the weights stay fixed. By default, they are trained."""

    lr: LearningRate | None = None
    """Peak learning rate of these weights. Default: `train.lr`."""

    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the weights. Set it only together with `freeze: true`. Default: the dtype of the model."""

    recompute: Literal["none", "full", "selective"] | None = None
    """Activations of this submodule that the backward pass recomputes. Default: `parallel.recompute`. Its description
    explains the values."""

    @model_validator(mode="after")
    def _check_weight_source(self) -> "SubmoduleSettings":
        """Check that at most one of `path` and `config` is set, and that a mapping in `config` has a model type."""
        if self.path is not None and self.config is not None:
            raise ValueError(
                "path and config are both set. Keep path for pretrained weights, or config for random initialization."
            )
        if isinstance(self.config, dict) and "model_type" not in self.config:
            raise ValueError("config has no `model_type`. Add it; arguments of a plugin class belong to `options`.")
        return self
