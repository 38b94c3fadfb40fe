"""Names of the built-in optimizers, with the types of their options."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from omnizoo.config.sections.built_in_options import check_options

# Arguments of optimizers that are not options, and the config keys that set them.
ELSEWHERE = {"params": "optimizer.groups", "lr": "train.lr", "weight_decay": "optimizer.weight_decay"}

Beta = Annotated[float, Field(ge=0, lt=1)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Floor = Annotated[float, Field(ge=0, le=1)]
Coefficient = Annotated[float, Field(ge=-1000, le=1000)]

ADAM = {"betas": tuple[Beta, Beta], "eps": Epsilon}
# For each built-in optimizer, the type of each option.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAM | {"amsgrad": bool, "fused": bool},
    "muon": ADAM
    | {
        "momentum": Beta,
        "nesterov": bool,
        "ns_steps": Annotated[int, Field(ge=1, le=99)],
        "ns_coefficients": tuple[Coefficient, Coefficient, Coefficient],
        "adjust_lr_fn": Literal["match_rms_adamw", "original"],
        "split_heads": bool,
    },
    "adafactor": {
        "beta2_decay": Annotated[float, Field(ge=-10, le=0)],
        "eps": tuple[Floor | None, Floor],
        "d": Annotated[float, Field(ge=1, le=1e6)],
    },
    "adamw_8bit": ADAM | {"amsgrad": bool, "block_size": Annotated[int, Field(ge=1, le=2**20)]},
}


def check_optimizer_options(kind: str, options: Mapping[str, Any], key: str) -> None:
    """Check the options of a built-in optimizer.

    Options of a plugin are checked later, against its signature, when the plugin is imported.

    Args:
        kind: Kind of the optimizer.
        options: The options in the config.
        key: Config key of the options; error messages start with it.

    Raises:
        ValueError: If an option is unknown or has an invalid value, or if another config key sets this argument.
    """
    for name, config_key in ELSEWHERE.items():
        if name in options:
            raise ValueError(f"{key}.{name}: not an option. Set {config_key} instead.")
    if kind in OPTIMIZERS:
        check_options(kind, OPTIMIZERS[kind], options, key)
