"""Type checkers see the real type of every public name, although the package imports them lazily."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import omnizoo

ROOT = Path(__file__).parents[1]
STUB = ROOT / "omnizoo" / "__init__.pyi"


def test_stub_imports_every_public_name_from_its_module() -> None:
    imported = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported[alias.name] = node.module
    assert imported == omnizoo._HOME


def test_stub_exports_exactly_the_public_names() -> None:
    exported = next(node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.Assign))
    assert sorted(ast.literal_eval(exported.value)) == sorted(omnizoo.__all__)


@pytest.mark.slow
def test_strict_user_file_sees_no_public_name_as_any(tmp_path: Path) -> None:
    user_file = tmp_path / "user_file.py"
    lines = ["import omnizoo", *(f"reveal_type(omnizoo.{name})" for name in omnizoo.__all__)]
    user_file.write_text("\n".join(lines) + "\n")
    # The cache of `make types` is used where it exists. The package itself is checked there, and is silent here.
    options = ["--strict", "--follow-imports", "silent", "--no-error-summary", "--config-file", "pyproject.toml"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(user_file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    revealed = re.findall(r'Revealed type is "(.*)"', result.stdout)
    assert len(revealed) == len(omnizoo.__all__), result.stdout + result.stderr
    untyped = [name for name, kind in zip(omnizoo.__all__, revealed, strict=True) if kind == "Any"]
    assert not untyped
    assert result.returncode == 0, result.stdout
