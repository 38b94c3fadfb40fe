"""Find the lines of code that cause host syncs in a dry run, that is, make the host wait for the device.

Paths in OmniZoo are relative to the package, and paths in user code are relative to the working directory.
"""

from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import torch

import omnizoo
from omnizoo.ops import torch_private
from omnizoo.parallel import collective_counter

BACKWARD = "torch's backward"  # reported location of operators that autograd calls, not a line of Python
PACKAGE, PLANNING, TORCH = (str(Path(module).parent) for module in (omnizoo.__file__, __file__, torch.__file__))


@dataclass(frozen=True)
class Sync:
    """A line of code that causes a host sync."""

    where: str  # file:line; a line of OmniZoo if any caller is in OmniZoo
    function: str  # function that contains the line
    kind: str  # `value` (read of a value), `shape` (depends on values), `to_host` or `to_device` (synchronous copies)
    detail: str  # the operator, and the line that called the operator if that line is not `where`


def find_sync(kind: str, operator: str) -> Sync:
    """Return the host sync that the running operator causes, with the line that called the operator."""
    where, function, caller = calling_line()
    detail = operator if caller == where else f"{operator} at {caller}"
    return Sync(where=where, function=function, kind=kind, detail=detail)


def passes_on(file: str) -> bool:
    """Whether `file` belongs to torch or to a wrapper of torch functions.

    The search for the line that called an operator skips such files.
    """
    return file.startswith((PLANNING, TORCH, "<")) or file in (collective_counter.__file__, torch_private.__file__)


def calling_line() -> tuple[str, str, str]:
    """Return (innermost line of OmniZoo on the stack, function of that line, innermost line of any package).

    Files for which `passes_on` is true are skipped. Without a line of OmniZoo, both lines are the same.
    """
    innermost = ""
    for frame, line in walk_stack(None):
        file = frame.f_code.co_filename
        if passes_on(file):
            continue
        location = short_name(file, line)
        innermost = innermost or location
        if file.startswith(PACKAGE):
            return location, _function(frame), innermost
    innermost = innermost or BACKWARD
    return innermost, "", innermost


def _function(frame: FrameType) -> str:
    """Return the name of the function of `frame`; for comprehensions and lambdas, the name of the calling function."""
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension or lambda
        frame = frame.f_back
    return frame.f_code.co_name


def short_name(file: str, line: int) -> str:
    """Return `file:line`, relative to site-packages, to the parent of OmniZoo, or to the working directory."""
    path = Path(file)
    if "site-packages" in path.parts:
        path = Path(*path.parts[path.parts.index("site-packages") + 1 :])
    elif file.startswith(PACKAGE):
        path = path.relative_to(Path(PACKAGE).parent)
    elif path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"
