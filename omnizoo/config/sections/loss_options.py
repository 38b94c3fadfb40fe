"""Names of the built-in losses, with the types of their options."""

from typing import Annotated, Any, Literal

from pydantic import Field

Positive = Annotated[float, Field(gt=0, le=1000)]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]
NonNegative = Annotated[float, Field(ge=0, le=1000)]
Folder = Annotated[str, Field(min_length=1)]
POLICY = {  # options of all losses for rollouts
    "clip_low": Annotated[float, Field(gt=0, le=1)],
    "clip_high": Positive,
    "beta": NonNegative,
    "temperature": Positive,
    "chunked": bool,
}
DENOISE = {
    "density": Literal["logit_normal", "uniform", "mode"],
    "mean": Annotated[float, Field(ge=-10, le=10)],
    "std": Annotated[float, Field(gt=0, le=10)],
    "scale": Annotated[float, Field(ge=-1, le=1.75)],
    "shift": Annotated[float, Field(gt=0, le=1000)],
    "weighting": Literal["none", "min_snr", "sigma_sqrt", "cosmap"],
    "snr_gamma": Positive,
    "prediction": Literal["flow", "epsilon", "v"],
    "guidance": NonNegative,
}
# For each built-in loss, the type of each option.
LOSSES: dict[str, dict[str, Any]] = {
    "cross_entropy": {
        "label_smoothing": Annotated[float, Field(ge=0, lt=1)],
        "z_loss": NonNegative,
        "chunked": bool,
    },
    "balance": {},
    "router_z": {},
    "dpo": {
        "beta": Positive,
        "loss": Literal["sigmoid", "ipo", "hinge"],
        "label_smoothing": BelowHalf,
        "length_normalized": bool,
        "reference": str,
        "reference_cache": Folder,
        "reference_free": bool,
        "chunked": bool,
    },
    "kto": {
        "beta": Positive,
        "desirable_weight": NonNegative,
        "undesirable_weight": NonNegative,
        "baseline": Literal["kl", "zero"],
        "reference": str,
        "reference_cache": Folder,
        "chunked": bool,
    },
    "orpo": {"beta": Positive, "chunked": bool},
    "simpo": {
        "beta": Positive,
        "gamma": NonNegative,
        "label_smoothing": BelowHalf,
        "chunked": bool,
    },
}
# Losses of sequence classification models.
LOSSES |= {
    "reward": {"centering": NonNegative},
    "classification": {
        "labels": Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, max_length=10**5)],
        "problem": Literal["single", "multi"],
    },
}
LOSSES["denoise"] = DENOISE
# Losses for rollouts.
LOSSES |= {
    "grpo": POLICY
    | {
        "aggregation": Literal["token", "sample", "constant"],
        "length": Annotated[int, Field(ge=1, le=10**9)],
    },
    "gspo": POLICY,
}
PAIRWISE = ("dpo", "orpo", "simpo", "reward")  # losses that compare the two responses of a preference pair
PREFERENCES = (*PAIRWISE, "kto")  # KTO uses labeled responses; it treats a pair as two labeled responses
ROUTER_LOSSES = ("balance", "router_z")
SCORE_LOSSES = ("reward", "classification")  # losses on the scores of a sequence classification model


def default_name(kind: str) -> str:
    """Return the name of a loss for which the config sets no `name`."""
    return "text" if kind == "cross_entropy" else kind.rpartition(":")[2].lower()
