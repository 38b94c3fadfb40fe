"""Table of model families with a recipe, from `omnizoo recipes --markdown`."""

import os
import subprocess
import sys
from pathlib import Path

from generators.source import PACKAGE, ROOT


def write_table(path: Path) -> None:
    """Write the table, unless it is newer than all recipes: the command imports transformers, which takes seconds."""
    sources = [*(PACKAGE / "recipes").rglob("*.py"), *(PACKAGE / "cli").rglob("recipes*")]
    newest = max(source.stat().st_mtime for source in sources)
    if path.exists() and path.stat().st_mtime > newest:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "omnizoo", "recipes", "--markdown", str(path)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
