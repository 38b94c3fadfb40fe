"""The built-in optimizers and what each of their options may be: a mistake is found before torch is imported."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from omnizoo.config.options import Option, check_options

ELSEWHERE = {"params": "optimizer.groups", "lr": "train.lr", "weight_decay": "optimizer.weight_decay"}

Beta = Annotated[float, Field(ge=0, lt=1)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Floor = Annotated[float, Field(ge=0, le=1)]
Coefficient = Annotated[float, Field(ge=-1000, le=1000)]

SWITCH = Option(bool, "true or false")
ADAM = {
    "betas": Option(tuple[Beta, Beta], "two numbers >= 0, < 1"),
    "eps": Option(Epsilon, "number > 0, <= 1"),
}
OPTIMIZERS: dict[str, dict[str, Option]] = {
    "adamw": ADAM | {"amsgrad": SWITCH, "fused": SWITCH},
    "muon": ADAM
    | {
        "momentum": Option(Beta, "number >= 0, < 1"),
        "nesterov": SWITCH,
        "ns_steps": Option(Annotated[int, Field(ge=1, le=99)], "integer >= 1, <= 99"),
        "ns_coefficients": Option(tuple[Coefficient, Coefficient, Coefficient], "three numbers >= -1000, <= 1000"),
        "adjust_lr_fn": Option(Literal["match_rms_adamw", "original"], "match_rms_adamw or original"),
    },
    "adafactor": {
        "beta2_decay": Option(Annotated[float, Field(ge=-10, le=0)], "number >= -10, <= 0"),
        "eps": Option(tuple[Floor | None, Floor], "two numbers >= 0, <= 1, of which the first may be null"),
        "d": Option(Annotated[float, Field(ge=1, le=1e6)], "number >= 1, <= 1e6"),
    },
    "adamw_8bit": ADAM
    | {"amsgrad": SWITCH, "block_size": Option(Annotated[int, Field(ge=1, le=2**20)], "integer >= 1, <= 1048576")},
}


def check_optimizer_options(kind: str, options: Mapping[str, Any], key: str) -> None:
    """ValueError, which begins with the key, for an option that a built-in `kind` does not have or cannot have so.

    Of a class of the user's own only its signature knows: that is asked when it is imported.
    """
    for name, other in ELSEWHERE.items():
        if name in options:
            raise ValueError(f"{key}.{name}: it is set by {other}; leave it out of the options")
    if kind in OPTIMIZERS:
        check_options(kind, OPTIMIZERS[kind], options, key)
