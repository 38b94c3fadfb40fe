"""Invariants of the source: the core names no modality and no model, and only some packages communicate.

import-linter, in `make lint`, checks which package may import which.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import layout_metrics
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

PACKAGE = Path(__file__).parents[1] / "omnizoo"
FILES = sorted(PACKAGE.rglob("*.py"))
MODALITIES = {"image", "images", "audio", "audios", "video", "videos", "vision", "speech"}
MAY_NAME_MODALITIES = ("modalities", "recipes")
FOREIGN_CONFIGS = PACKAGE / "config" / "foreign"  # tables with config keys of other trainers


def package_of(file: Path) -> str:
    """Return the sub-package of a file."""
    return file.relative_to(PACKAGE).parts[0]


@dataclass(frozen=True)
class Source:
    """Contents of a source file, each with its line."""

    strings: list[tuple[int, str]]  # except docstrings and config descriptions
    imports: list[tuple[int, str]]  # dotted names
    attributes: list[tuple[int, str]]  # dotted names that begin with a variable or module


@cache
def read_source(file: Path) -> Source:
    """Parse a file once for all tests."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    prose = {node.value for node in nodes if isinstance(node, ast.Expr)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    prose |= {keyword.value for call in calls for keyword in call.keywords if keyword.arg == "description"}
    source = Source([], [], [])
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            source.strings.append((node.lineno, node.value))
        elif isinstance(node, ast.Import):
            source.imports.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            source.imports.extend((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            source.attributes.append((node.lineno, dotted_name(node)))
    return source


def dotted_name(node: ast.expr) -> str:
    """Return `a.b.c` for an attribute of an attribute of a name; other expressions become an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_package_files_are_found() -> None:
    assert len(FILES) > 30
    assert {"models", "ops", "parallel", "training"} <= {package_of(file) for file in FILES}


PACKAGES = sorted({package_of(file) for file in FILES if file.parent != PACKAGE})
# Names of torch.distributed that a package may use; `parallel` may use all of them.
MAY_USE = {
    "ops": (  # private names of torch are in one file
        "torch.distributed.distributed_c10d._abort_process_group",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",  # wrapped by plans
    ),
    "checkpoint": ("torch.distributed.checkpoint",),  # DCP, which calls collectives itself
    "planning": ("torch.distributed.tensor.DTensor", "torch.distributed.ProcessGroup"),  # to inspect them
    "verification": ("torch.distributed.tensor.DTensor", "torch.distributed.FileStore"),
    "cli": ("torch.distributed.is_backend_available",),
}


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "parallel"])
def test_only_allowed_packages_communicate(package: str) -> None:
    violations = [
        f"{file}:{line} {name}"
        for file in FILES
        if package_of(file) == package
        for line, name in [*read_source(file).imports, *read_source(file).attributes]
        if name.startswith("torch.distributed") and not name.startswith(MAY_USE.get(package, ()))
        if not any(allowed.startswith(name) for allowed in MAY_USE.get(package, ()))
    ]
    assert violations == []


def test_private_torch_names_are_imported_in_one_file() -> None:
    violations = [
        f"{file}:{line} {name}"
        for file in FILES
        if file != PACKAGE / "ops/torch_private.py"
        for line, name in read_source(file).imports
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
    ]
    assert violations == []


def test_communication_never_imports_models_modalities_or_recipes() -> None:
    above = ("omnizoo.models", "omnizoo.modalities", "omnizoo.recipes", "transformers")
    violations = [
        f"{file}:{line} {name}"
        for file in FILES
        if package_of(file) == "parallel"
        for line, name in read_source(file).imports
        if name.startswith(above)
    ]
    assert violations == []


def test_modality_names_are_only_in_modalities_and_recipes() -> None:
    violations = [
        f"{file}:{line} {text!r}"
        for file in FILES
        if package_of(file) not in MAY_NAME_MODALITIES and FOREIGN_CONFIGS not in file.parents
        for line, text in read_source(file).strings
        if not text.startswith("omnizoo.modalities.")  # a module path
        and MODALITIES & set(text.lower().replace("/", " ").replace(".", " ").replace("_", " ").split())
    ]
    assert violations == []


def test_model_types_are_only_named_in_recipes() -> None:
    """No string is a model type, and no class of a model family is imported, so none is patched or copied."""
    types = set(CONFIG_MAPPING_NAMES) - {"git"}  # also the name of a program
    assert {"qwen3", "llama", "gpt_oss"} <= types
    violations = [
        f"{file}:{line} {text!r}"
        for file in FILES
        if package_of(file) != "recipes"
        for line, text in read_source(file).strings
        if text in types
    ]
    violations += [
        f"{file}:{line} {name}"
        for file in FILES
        if package_of(file) != "recipes"
        for line, name in read_source(file).imports
        if name.startswith("transformers.models.") and not name.startswith("transformers.models.auto.")
    ]
    assert violations == []


def test_no_code_branches_on_composed_models() -> None:
    """Composed models and multimodal HF models share the interface `MediaModel`."""
    others = [file for file in FILES if file != PACKAGE / "models/media/composed.py"]
    violations = [
        f"{f}:{line} {name}" for f in others for line, name in read_source(f).imports if name.endswith(".OmniModel")
    ]
    assert violations == []


def test_package_does_not_unpickle() -> None:
    """The package does not use pickle or torch.load.

    Exceptions: object collectives of torch between ranks, and data that a rank passes to its loader workers.
    """
    others = [file for file in FILES if file != PACKAGE / "data/loading/worker_pickling.py"]
    violations = [
        f"{f}:{line} {name}"
        for f in others
        for line, name in read_source(f).imports
        if name.split(".")[0] in ("pickle", "dill")
    ]
    violations += [
        f"{f}:{line} {name}" for f in FILES for line, name in read_source(f).attributes if name == "torch.load"
    ]
    assert violations == []


def test_package_keeps_its_size_and_shape() -> None:
    """tests/support/layout_metrics.py has the limits, and prints where they are exceeded."""
    functions = list(layout_metrics.functions())
    crowded = {
        folder: count
        for folder, count in layout_metrics.files_per_folder().items()
        if count > layout_metrics.MOST_FILES_PER_FOLDER and folder not in layout_metrics.UNLIMITED_FOLDERS
    }
    long_functions = [function for function in functions if function.lines > layout_metrics.LONG_FUNCTION_LINES]
    assert crowded == {}
    assert [function for function in functions if function.lines > layout_metrics.MOST_FUNCTION_LINES] == []
    assert len(long_functions) <= layout_metrics.MOST_LONG_FUNCTIONS
    assert [function for function in functions if function.branches > layout_metrics.MOST_BRANCHES] == []
    assert {name for name, lines in layout_metrics.family_files().items() if lines > 80} == set()
    assert layout_metrics.classes_defined_twice() == {}
    assert layout_metrics.tests_that_import_tests() == []


def test_only_the_command_line_imports_recipes() -> None:
    violations = [
        f"{file}:{line} {name}"
        for file in FILES
        if package_of(file) not in ("cli", "recipes")
        for line, name in read_source(file).imports
        if name.startswith("omnizoo.recipes")
    ]
    assert violations == []
