"""Tested versions of the packages whose private APIs OmniZoo calls, and error messages about other versions.

`pyproject.toml` contains the same ranges. A patch release may still change a private API. Building a model therefore
checks the signatures of private functions, so that a change is a one-line error instead of a traceback during a run.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omnizoo.config.errors import UserError

# First and last tested version of each package.
TESTED = {"torch": ("2.13.0", "2.13.0"), "transformers": ("5.21.1", "5.23.0"), "peft": ("0.21.2", "0.21.2")}
Signature = tuple[Callable[..., Any], Sequence[str]]  # a function, and the names of its first parameters


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the tested packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def install_command(extra: str) -> str:
    """Return the command that installs an optional dependency group ("extra") of pyproject.toml."""
    return f"pip install 'omnizoo[{extra}]'"


def advice(package: str) -> str:
    """Return the installed and the tested versions of a package, and the command that installs a tested one."""
    first, last = TESTED[package]
    installed = installed_versions([package]).get(package)
    if installed is None:
        return f"{package} is not installed; pip install '{package}=={last}'"
    tested = first if first == last else f"{first} to {last}"
    return f"{package} {installed} is installed, and omnizoo was tested with {tested}; pip install '{package}=={last}'"


def explain_import(error: ImportError) -> str | None:
    """Return a one-line explanation of a failed import from a tested package; None for other packages."""
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
