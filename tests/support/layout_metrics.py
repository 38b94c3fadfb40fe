"""Print the size and shape of the package: tokens, files per folder, longest functions, duplicate class names.

    python tests/support/layout_metrics.py

`tests/test_architecture.py` checks the limits that are stated here.
"""

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "omnizoo"
TESTS = ROOT / "tests"

TOKENS_AFTER_RESTRUCTURING = 324_999  # at commit 5f34c53, before lines were split and values named
MOST_FILES_PER_FOLDER = 16
MOST_FUNCTION_LINES = 70
LONG_FUNCTION_LINES = 60
MOST_LONG_FUNCTIONS = 5
MOST_BRANCHES = 25
MOST_FAMILY_LINES = 80
UNLIMITED_FOLDERS = ("recipes", "recipes/shared")

LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case, ast.comprehension)


@dataclass(frozen=True)
class Function:
    """One function of the package and how hard it is to read."""

    path: str
    name: str
    lines: int  # lines with code, docstring and comments excluded
    branches: int


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module and of everything that it defines."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, *DEFINITIONS)):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.value


def count_tokens(source: str) -> int:
    """Return the number of Python tokens without comments, docstrings and layout."""
    skipped = {(string.lineno, string.col_offset) for string in docstrings(ast.parse(source))}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT_TOKENS and token.start not in skipped for token in tokens)


def count_branches(function: ast.AST) -> int:
    """Return 1 + the number of decisions: statements, conditional expressions, comprehensions, boolean operators."""
    total = 1
    for node in ast.walk(function):
        total += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            total += len(node.ifs)
    return total


def code_lines(source: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function that have code on them."""
    documentation: set[int] = set()
    for string in docstrings(function):
        documentation |= set(range(string.lineno, (string.end_lineno or string.lineno) + 1))
    lines = source.splitlines()[function.lineno - 1 : function.end_lineno]
    numbered = enumerate(lines, start=function.lineno)
    return sum(
        bool(text.strip()) and not text.strip().startswith("#") and n not in documentation for n, text in numbered
    )


def functions() -> Iterator[Function]:
    for path in package_files():
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, FUNCTIONS):
                name = str(path.relative_to(PACKAGE))
                yield Function(name, node.name, code_lines(source, node), count_branches(node))


def files_per_folder() -> dict[str, int]:
    """Return the number of modules in each folder, without `__init__.py`."""
    files = [path for path in package_files() if path.name != "__init__.py"]
    return dict(Counter(str(path.parent.relative_to(PACKAGE)) for path in files))


def classes_defined_twice() -> dict[str, list[str]]:
    """Return the class names that stand for more than one class, and where these are."""
    places = defaultdict(list)
    for path in package_files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def tests_that_import_tests() -> list[str]:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1].startswith("test_"):
                found.append(f"{path.relative_to(TESTS)}:{node.lineno}")
    return found


def family_files() -> dict[str, int]:
    """Return the number of lines of each family's recipe."""
    files = [path for path in (PACKAGE / "recipes").glob("*.py") if path.name not in ("__init__.py", "zoo.py")]
    return {path.name: len(path.read_text().splitlines()) for path in files}


def total_tokens() -> int:
    return sum(count_tokens(path.read_text()) for path in package_files())


def main() -> None:
    by_length = sorted(functions(), key=lambda function: -function.lines)
    by_branches = sorted(by_length, key=lambda function: -function.branches)
    long_functions = [function for function in by_length if function.lines > LONG_FUNCTION_LINES]
    crowded = {f: n for f, n in files_per_folder().items() if n > MOST_FILES_PER_FOLDER and f not in UNLIMITED_FOLDERS}
    long_families = {name: lines for name, lines in family_files().items() if lines > MOST_FAMILY_LINES}
    before = f"{TOKENS_AFTER_RESTRUCTURING:,} after the restructuring"
    print(f"tokens                              {total_tokens():,} ({before})")
    print(f"files                               {len(package_files())}")
    print(f"folders with over {MOST_FILES_PER_FOLDER} files          {crowded or 0}")
    print(f"longest function                    {by_length[0]} (at most {MOST_FUNCTION_LINES})")
    print(
        f"functions over {LONG_FUNCTION_LINES} lines             {len(long_functions)} (at most {MOST_LONG_FUNCTIONS})"
    )
    for function in long_functions:
        print(f"    {function.path} {function.name}: {function.lines}")
    print(f"most branches                       {by_branches[0]} (at most {MOST_BRANCHES})")
    for function in by_branches:
        if function.branches > MOST_BRANCHES:
            print(f"    {function.path} {function.name}: {function.branches}")
    print(f"families over {MOST_FAMILY_LINES} lines              {long_families or 0}")
    print(f"class names with two meanings       {classes_defined_twice() or 0}")
    print(f"tests that import tests             {tests_that_import_tests() or 0}")
    print("files per folder:")
    for folder, count in sorted(files_per_folder().items()):
        print(f"    {folder:32} {count}")


if __name__ == "__main__":
    main()
