"""The built-in losses, what each of their options may be, and what a loss is called."""

from typing import Annotated

from pydantic import Field

from omnizoo.config.options import Option

LOSSES: dict[str, dict[str, Option]] = {
    "cross_entropy": {
        "label_smoothing": Option(Annotated[float, Field(ge=0, lt=1)], "number >= 0, < 1"),
        "z_loss": Option(Annotated[float, Field(ge=0, le=1000)], "number >= 0, <= 1000"),
        "chunked": Option(bool, "true or false"),
    },
    "balance": {},
    "router_z": {},
}


def default_name(kind: str) -> str:
    """What a loss is called that the config gives no name."""
    return "text" if kind == "cross_entropy" else kind.rpartition(":")[2].lower()
