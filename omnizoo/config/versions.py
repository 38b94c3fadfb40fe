"""Versions of the packages whose private names OmniZoo calls: those it was tested with, and what is said of others.

`pyproject.toml` has the same ranges. Inside of them a private name may still move with a patch release, so those that
are called are looked at when a model is built, and one that moved is a line, not a traceback in the middle of a run.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omnizoo.config.errors import UserError

TESTED = {"torch": ("2.13.0", "2.13.0"), "transformers": ("5.21.1", "5.23.0"), "peft": ("0.21.2", "0.21.2")}
Signature = tuple[Callable[..., Any], Sequence[str]]  # a function, and the names of its first parameters


def advice(package: str) -> str:
    """What is installed, what was tested, and how to get it."""
    first, last = TESTED[package]
    try:
        installed = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed; pip install '{package}=={last}'"
    tested = first if first == last else f"{first} to {last}"
    return f"{package} {installed} is installed, and omnizoo was tested with {tested}; pip install '{package}=={last}'"


def explain_import(error: ImportError) -> str | None:
    """In one line, an import that failed since a package is of another version; None if it is none of these."""
    package = (error.name or "").partition(".")[0]
    if package not in TESTED:
        return None
    return f"{error.msg.splitlines()[0]}: {advice(package)}"


def check_signatures(package: str, called: Mapping[str, Signature]) -> None:
    """`called`: by name, what is called of `package` and by which parameters."""
    for name, (function, expected) in called.items():
        found = list(inspect.signature(function).parameters)[: len(expected)]
        if found != list(expected):
            raise UserError(
                f"{name} of {package} takes ({', '.join(found)}), and is called with ({', '.join(expected)}): "
                f"{advice(package)}"
            )
