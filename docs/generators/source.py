"""Reads constants and classes from the source files of the package, without importing them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "omnizoo"


def file_of(module: str) -> Path:
    """Return the source file of a module, such as `omnizoo.data.row`."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def syntax_tree(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def assigned_value(module: str, name: str) -> ast.expr:
    """Return the expression that is assigned to a module-level name.

    Raises:
        LookupError: If there is none. The constant was renamed: change the generator, too.
    """
    for node in syntax_tree(module).body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            is_split = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = list(zip(target.elts, value.elts, strict=True)) if is_split else [(target, value)]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Name) and target.id == name:
                return value
    raise LookupError(f"{module} has no constant {name}; docs/generators reads it")


def constant(module: str, name: str) -> Any:
    """Return the value of a module-level constant that consists of literals and arithmetic."""
    value = assigned_value(module, name)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("frozenset", "dict"):
        value = value.args[0]
    return eval(compile(ast.Expression(value), module, "eval"), {"__builtins__": {}}, {})


def modules() -> Iterator[str]:
    """Yield the names of all modules of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def package() -> griffe.Module:
    """Return the package as griffe reads it, with docstrings in Google style."""
    loaded = griffe.load("omnizoo", search_paths=[str(ROOT)], docstring_parser="google", allow_inspection=False)
    assert isinstance(loaded, griffe.Module)
    return loaded


def member(module: str, name: str) -> griffe.Object | griffe.Alias:
    """Return a class or function by its module and name."""
    found = package()[f"{module.removeprefix('omnizoo.')}.{name}"]
    assert isinstance(found, griffe.Object | griffe.Alias)
    return found
