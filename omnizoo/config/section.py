"""What all sections of the config are made of: the section itself, types of values, parts with options, objects that
were given from Python.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

LONGEST_TEXT = 4096  # no path is longer
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)]
Rate = Annotated[float, Field(gt=0, le=1000)]  # of learning
Weight = Annotated[float, Field(ge=0, le=1e6)]  # of a loss
Count = Annotated[int, Field(ge=1, le=2**20)]  # of ranks, or of packs in a step
Decay = Annotated[float, Field(ge=0, le=1000)]  # of weights
Steps = Annotated[int, Field(ge=0, le=10**12)]


@dataclass(frozen=True, eq=False)
class Given:
    """An object that `omnizoo.train` was given from Python. A file holds its name in its place."""

    value: Any = field(repr=False)
    name: str


def _written(value: Any) -> Any:
    return value.name if isinstance(value, Given) else value


Object = Annotated[Text | Given | None, PlainSerializer(_written)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        arbitrary_types_allowed=True,  # `Given`
    )


class Part(Section):
    """A piece of a model with weights of its own."""

    path: Text | None = Field(None, description="HF folder with its pretrained weights")
    config: Text | dict[str, Any] | None = Field(
        None, description="HF folder or inline mapping (with `model_type`); weights are drawn from `train.seed`"
    )
    freeze: bool = Field(False, description="do not train it")
    lr: Rate | None = Field(None, description="peak learning rate; default: `train.lr`")
    dtype: Literal["fp32", "bf16"] | None = Field(
        None, description="precision its weights are kept in; other than the run's own: frozen parts only"
    )
    recompute: Literal["none", "full", "selective"] | None = Field(
        None, description="recompute its activations in backward; default: `parallel.recompute`"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "Part":
        if self.path is not None and self.config is not None:
            raise ValueError("give one of path (weights) and config (random init), not both")
        if isinstance(self.config, dict) and "model_type" not in self.config:
            raise ValueError("config as a mapping needs a `model_type`; arguments of a class go into `options`")
        return self
