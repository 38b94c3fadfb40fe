"""Runs the shell blocks of README and docs that are marked `<!-- docs-check -->`: `make docs-check`.

The marked blocks of one page run in order, in one `bash -e` session, in a scratch folder with a copy of `examples`.
Arguments select pages by a part of their path: `python docs/check_commands.py tutorials how-to/data`.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("tutorials", "how-to", "reference", "explanation", "project")
MARKED = re.compile(r"^<!-- docs-check -->\n+```sh\n(.*?)^```", re.M | re.S)
LAST_LINES = 40  # lines of output that are shown of a page that fails


class Result(NamedTuple):
    page: str
    blocks: int
    seconds: float
    problem: str  # "" if all commands succeeded


def marked_blocks(page: Path) -> list[str]:
    """Return the marked shell blocks of a page, in order."""
    return MARKED.findall(page.read_text(encoding="utf-8"))


def pages(selected: list[str]) -> Iterator[Path]:
    """Yield the pages with marked blocks whose path contains one of the words, or all of them without words."""
    candidates = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in FOLDERS:
        candidates += sorted((ROOT / "docs" / folder).rglob("*.md"))
    for page in candidates:
        name = page.relative_to(ROOT).as_posix()
        is_selected = not selected or any(word in name for word in selected)
        if is_selected and page.exists() and marked_blocks(page):
            yield page


def run_page(page: Path, limit: float) -> Result:
    """Run the marked blocks of a page, print them, and print the end of their output if a command fails."""
    name = page.relative_to(ROOT).as_posix()
    blocks = marked_blocks(page)
    print(f"\n{name}", flush=True)
    for line in "".join(blocks).splitlines():
        print(f"  $ {line}", flush=True)

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="docs_check_") as folder:
        scratch = Path(folder) / "work"
        shutil.copytree(ROOT / "examples", scratch / "examples")
        output = Path(folder) / "output.txt"
        problem = _run_script("\n".join(blocks), scratch, output, limit)
        if problem:
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            print("\n".join(f"  | {line}" for line in lines[-LAST_LINES:]), flush=True)
    return Result(name, len(blocks), time.monotonic() - started, problem)


def _run_script(script: str, scratch: Path, output: Path, limit: float) -> str:
    """Run a script with the programs of this environment. Return "" or what went wrong."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with open(output, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            ["bash", "-e", "-v", "-c", script],
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the shell and all ranks that it started
            process.wait()
            return f"no end after {limit:g} s"
    return "" if code == 0 else f"exit code {code}"


def main() -> int:
    """Check the pages and print a table. Returns 1 if a page failed."""
    parser = argparse.ArgumentParser(description="Run the shell blocks of the docs that are marked docs-check.")
    parser.add_argument("pages", nargs="*", help="parts of the paths of pages (default: all)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one page (default: 600)")
    args = parser.parse_args()

    results = [run_page(page, args.timeout) for page in pages(args.pages)]
    print(f"\n{'page':40} {'blocks':>6} {'seconds':>8}  result")
    for result in results:
        print(f"{result.page:40} {result.blocks:6} {result.seconds:8.1f}  {result.problem or 'pass'}")
    return 1 if not results or any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
