"""The invariants that a reader of the source can check: no modality and no model is named in the core, and computation
never meets communication. (Which room may import which is import-linter's, in `make lint`.)
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import layout_metrics
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

PACKAGE = Path(__file__).parents[1] / "omnizoo"
FILES = sorted(PACKAGE.rglob("*.py"))
MODALITIES = {"image", "images", "audio", "audios", "video", "videos", "vision", "speech"}
NAMED_FREELY = ("modalities", "recipes")


def room(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0]


def strings(file: Path) -> Iterator[tuple[int, str]]:
    """Strings of the code; those that stand alone (docstrings) and config descriptions are prose."""
    tree = ast.parse(file.read_text())
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    prose |= {
        k.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for k in node.keywords
        if k.arg == "description"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.lineno, node.value


def imports(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def names_used(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def test_package_files_are_found() -> None:
    assert len(FILES) > 30
    assert {"models", "ops", "parallel", "training"} <= {room(file) for file in FILES}


ROOMS = sorted({room(file) for file in FILES if file.parent != PACKAGE})
# What of torch.distributed a room may have, besides `parallel`, which has all of it.
MAY_USE = {
    "ops": (  # private names of torch are in one file
        "torch.distributed.distributed_c10d._abort_process_group",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",  # wrapped by plans
    ),
    "checkpoint": ("torch.distributed.checkpoint",),  # DCP, which has collectives of its own
    "planning": ("torch.distributed.tensor.DTensor", "torch.distributed.ProcessGroup"),  # to look at them
    "verification": ("torch.distributed.tensor.DTensor", "torch.distributed.FileStore"),
    "cli": ("torch.distributed.is_backend_available",),
}


@pytest.mark.parametrize("which", [name for name in ROOMS if name != "parallel"])
def test_only_allowed_packages_communicate(which: str) -> None:
    found = [
        f"{file}:{line} {name}"
        for file in FILES
        if room(file) == which
        for line, name in [*imports(file), *names_used(file)]
        if name.startswith("torch.distributed") and not name.startswith(MAY_USE.get(which, ()))
        if not any(allowed.startswith(name) for allowed in MAY_USE.get(which, ()))
    ]
    assert found == []


def test_private_torch_names_are_imported_in_one_file() -> None:
    found = [
        f"{file}:{line} {name}"
        for file in FILES
        if file != PACKAGE / "ops/torch_private.py"
        for line, name in imports(file)
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
    ]
    assert found == []


def test_communication_never_imports_models_modalities_or_recipes() -> None:
    above = ("omnizoo.models", "omnizoo.modalities", "omnizoo.recipes", "transformers")
    found = [
        f"{file}:{line} {name}"
        for file in FILES
        if room(file) == "parallel"
        for line, name in imports(file)
        if name.startswith(above)
    ]
    assert found == []


def test_modality_names_are_only_in_modalities_and_recipes() -> None:
    found = [
        f"{file}:{line} {text!r}"
        for file in FILES
        if room(file) not in NAMED_FREELY
        for line, text in strings(file)
        if not text.startswith("omnizoo.modalities.")  # a module path
        and MODALITIES & set(text.lower().replace("/", " ").replace(".", " ").replace("_", " ").split())
    ]
    assert found == []


def test_model_types_are_only_named_in_recipes() -> None:
    """A string that is a model type; and no class of a family is imported, so that none is patched or copied."""
    types = set(CONFIG_MAPPING_NAMES) - {"git"}  # the program, too
    assert {"qwen3", "llama", "gpt_oss"} <= types
    found = [
        f"{file}:{line} {text!r}"
        for file in FILES
        if room(file) != "recipes"
        for line, text in strings(file)
        if text in types
    ]
    found += [
        f"{file}:{line} {name}"
        for file in FILES
        if room(file) != "recipes"
        for line, name in imports(file)
        if name.startswith("transformers.models.") and not name.startswith("transformers.models.auto.")
    ]
    assert found == []


def test_no_code_branches_on_composed_models() -> None:
    """What either says of its media, it says by `MediaModel`."""
    others = [file for file in FILES if file != PACKAGE / "models/media/composed.py"]
    found = [f"{f}:{line} {name}" for f in others for line, name in imports(f) if name.endswith(".OmniModel")]
    assert found == []


def test_package_does_not_unpickle() -> None:
    """No pickle, and no torch.load; torch's own collectives of objects stay between our own ranks. So does what a rank
    gives its loader workers, which never is in a file that others could write."""
    others = [file for file in FILES if file != PACKAGE / "data/loading/worker_pickling.py"]
    found = [
        f"{f}:{line} {name}" for f in others for line, name in imports(f) if name.split(".")[0] in ("pickle", "dill")
    ]
    found += [f"{f}:{line} {name}" for f in FILES for line, name in names_used(f) if name == "torch.load"]
    assert found == []


def test_package_keeps_its_size_and_shape() -> None:
    """The limits of tests/support/layout_metrics.py, which prints where they are exceeded."""
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
    found = [
        f"{file}:{line} {name}"
        for file in FILES
        if room(file) not in ("cli", "recipes")
        for line, name in imports(file)
        if name.startswith("omnizoo.recipes")
    ]
    assert found == []
