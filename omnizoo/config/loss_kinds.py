"""The built-in losses, what each of their options may be, and what a loss is called."""

from typing import Annotated, Literal

from pydantic import Field

from omnizoo.config.options import Option

POSITIVE = Option(Annotated[float, Field(gt=0, le=1000)], "number > 0, <= 1000")
HALF = Option(Annotated[float, Field(ge=0, lt=0.5)], "number >= 0, < 0.5")
FROM_ZERO = Option(Annotated[float, Field(ge=0, le=1000)], "number >= 0, <= 1000")
CHUNKED = Option(bool, "true or false")
REFERENCE = Option(str, "a Hugging Face folder")
FOLDER = Option(Annotated[str, Field(min_length=1)], "a folder")
POLICY = {
    "clip_low": Option(Annotated[float, Field(gt=0, le=1)], "number > 0, <= 1"),
    "clip_high": POSITIVE,
    "beta": FROM_ZERO,
    "temperature": POSITIVE,
    "chunked": CHUNKED,
}
LOSSES: dict[str, dict[str, Option]] = {
    "cross_entropy": {
        "label_smoothing": Option(Annotated[float, Field(ge=0, lt=1)], "number >= 0, < 1"),
        "z_loss": FROM_ZERO,
        "chunked": CHUNKED,
    },
    "balance": {},
    "router_z": {},
    "dpo": {
        "beta": POSITIVE,
        "loss": Option(Literal["sigmoid", "ipo", "hinge"], "sigmoid, ipo or hinge"),
        "label_smoothing": HALF,
        "length_normalised": Option(bool, "true or false"),
        "reference": REFERENCE,
        "reference_cache": FOLDER,
        "chunked": CHUNKED,
    },
    "kto": {
        "beta": POSITIVE,
        "desirable_weight": FROM_ZERO,
        "undesirable_weight": FROM_ZERO,
        "baseline": Option(Literal["kl", "zero"], "kl or zero"),
        "reference": REFERENCE,
        "reference_cache": FOLDER,
        "chunked": CHUNKED,
    },
    "orpo": {"beta": POSITIVE, "chunked": CHUNKED},
    "simpo": {
        "beta": POSITIVE,
        "gamma": FROM_ZERO,
        "label_smoothing": HALF,
        "chunked": CHUNKED,
    },
}
# of rollouts
LOSSES |= {
    "grpo": POLICY
    | {
        "aggregation": Option(Literal["token", "sample", "constant"], "token, sample or constant"),
        "length": Option(Annotated[int, Field(ge=1, le=10**9)], "integer >= 1"),
    },
    "gspo": POLICY,
}
PAIRWISE = ("dpo", "orpo", "simpo")  # of preference pairs
PREFERENCES = (*PAIRWISE, "kto")  # kto: of single answers with a label; it reads pairs as two of them
OF_ROUTERS = ("balance", "router_z")


def default_name(kind: str) -> str:
    """What a loss is called that the config gives no name."""
    return "text" if kind == "cross_entropy" else kind.rpartition(":")[2].lower()
