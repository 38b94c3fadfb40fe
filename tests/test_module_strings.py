"""Modules that are named in strings exist. Preloading ignores import errors, so a wrong name only slows workers."""

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import processes
import pytest

import omnizoo
from omnizoo.data.loading import workers
from omnizoo.modalities import build as modality_build
from omnizoo.training.losses import base as losses
from omnizoo.training.optimizers import build as optimizers
from omnizoo.verification import rank_processes

ROOT = Path(__file__).parents[1]
OPTIMIZERS = list(optimizers.KINDS.values())
BUILT_IN = [
    *losses.KINDS.values(),
    *(kind.target for kind in OPTIMIZERS if kind.package is None),
    *(target for targets in modality_build.BUILT_IN.values() for target in targets.values()),
]
PRELOADED = [*workers.IMPORTED, *rank_processes.IMPORTED, *processes.IMPORTED]


@pytest.mark.parametrize("name", omnizoo.__all__)
def test_public_names_are_where_the_package_looks_for_them(name: str) -> None:
    assert getattr(omnizoo, name) is not None


def test_stub_declares_every_public_name_where_the_package_looks_for_it() -> None:
    declared = {}
    for node in ast.parse((ROOT / "omnizoo/__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            declared |= {alias.name: node.module for alias in node.names}
    assert declared == omnizoo._HOME


@pytest.mark.long
def test_users_see_real_types_of_every_public_name(tmp_path: Path) -> None:
    """`mypy --strict` on a file that imports every public name: none of them is Any."""
    names = sorted(omnizoo.__all__)
    lines = [f"from omnizoo import {name}\nreveal_type({name})\n" for name in names]
    (tmp_path / "user.py").write_text("".join(lines))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    revealed = re.findall(r'Revealed type is "(.*)"', result.stdout)
    assert len(revealed) == len(names), result.stdout
    assert "Any" not in revealed


@pytest.mark.parametrize("target", BUILT_IN)
def test_built_in_kinds_can_be_imported(target: str) -> None:
    module, _, name = target.partition(":")
    assert isinstance(getattr(import_module(module), name), type)


@pytest.mark.parametrize("target", [kind.target for kind in OPTIMIZERS if kind.package is not None])
def test_kinds_that_need_another_package_are_defined(target: str) -> None:
    module, _, name = target.partition(":")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"class {name}(" in Path(spec.origin).read_text()


@pytest.mark.parametrize("module", PRELOADED)
def test_preloaded_modules_can_be_imported(module: str) -> None:
    assert import_module(module)
