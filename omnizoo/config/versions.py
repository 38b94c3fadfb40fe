"""Tested versions of the packages whose private APIs OmniZoo calls, and messages about other versions.

`pyproject.toml` has the same ranges. A patch release may still change a private API. Signatures are therefore checked
when a model is built, so that a change is reported in one line instead of as a traceback during a run.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omnizoo.config.errors import UserError

TESTED = {"torch": ("2.13.0", "2.13.0"), "transformers": ("5.21.1", "5.23.0"), "peft": ("0.21.2", "0.21.2")}
Signature = tuple[Callable[..., Any], Sequence[str]]  # a function, and the names of its first parameters


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, one of those in pyproject.toml."""
    return f"pip install 'omnizoo[{extra}]'"


def advice(package: str) -> str:
    """Return a sentence with the installed version, the tested versions and the command to install one of them."""
    first, last = TESTED[package]
    installed = installed_versions([package]).get(package)
    if installed is None:
        return f"{package} is not installed; pip install '{package}=={last}'"
    tested = first if first == last else f"{first} to {last}"
    return f"{package} {installed} is installed, and omnizoo was tested with {tested}; pip install '{package}=={last}'"


def explain_import(error: ImportError) -> str | None:
    """Explain a failed import of a tested package in one line; None for other packages."""
    package = (error.name or "").partition(".")[0]
    if package not in TESTED:
        return None
    return f"{error.msg.splitlines()[0]}: {advice(package)}"


def check_signatures(package: str, called: Mapping[str, Signature]) -> None:
    """Check that private functions still have the expected parameters.

    Args:
        package: The package that the functions belong to.
        called: For each function name, the function and the names of its first parameters.

    Raises:
        UserError: If the parameters of a function differ.
    """
    for name, (function, expected) in called.items():
        parameters = list(inspect.signature(function).parameters)[: len(expected)]
        if parameters != list(expected):
            raise UserError(
                f"{package}: {name} has the parameters ({', '.join(parameters)}), but omnizoo calls it with "
                f"({', '.join(expected)}): {advice(package)}"
            )
