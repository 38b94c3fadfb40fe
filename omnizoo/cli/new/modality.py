"""`omnizoo new modality NAME`: write a modality that trains without edits, and its test.

Comments in the files mark the lines that users change for their modality.
"""

import argparse
import keyword
from pathlib import Path

from omnizoo.cli.render_file import render_file
from omnizoo.config.errors import UserError


def new_modality(args: argparse.Namespace) -> int:
    """Write `NAME.py` and `test_NAME.py` to the folder in `--out`. Returns the exit code 0.

    Raises:
        UserError: If the name is not valid, or a file exists or cannot be written.
    """
    name = args.data
    folder = args.out or Path()
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise UserError(
            f"new modality {name}: not a valid module name. Use a lowercase Python identifier, such as thermal."
        )
    templates = {folder / f"{name}.py": "modality.py.jinja", folder / f"test_{name}.py": "test_modality.py.jinja"}
    for path in templates:
        if path.exists():
            raise UserError(f"new modality {name}: {path} already exists. Delete it, or choose another name or --out.")
    class_name = "".join(word.capitalize() for word in name.split("_"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in templates.items():
            path.write_text(render_file(template, name=name, Name=class_name), encoding="utf-8")
            print(f"written: {path}")
    except OSError as error:
        raise UserError(f"new modality {name}: cannot write {error.filename}: {error.strerror}") from None
    return 0
