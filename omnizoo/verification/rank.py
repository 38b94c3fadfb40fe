"""The ranks of `omnizoo verify`: `python -m omnizoo.verification.rank FOLDER ...`, started by its launcher.

One world of processes tries layout after layout; the first rank compares and writes the verdicts.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from omnizoo.config.load import load_config
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.process import Process, process_group
from omnizoo.verification.compare import TOLERANCE, compare
from omnizoo.verification.prepare import VERDICTS, load_trial
from omnizoo.verification.trial import run_trial


def main(folders: list[Path]) -> None:
    torch.set_num_threads(1)
    with process_group() as process:
        for folder in folders:
            try_layouts(folder, process)


def try_layouts(folder: Path, process: Process) -> None:
    """Every layout that `folder` asks for; verdicts go there too."""
    config = load_config(folder / "config.yaml", [])
    layouts = [Layout(**sizes) for sizes in json.loads((folder / "layouts.json").read_text())]
    reference = load_trial(folder)
    for layout in layouts:
        trial = run_trial(config, layout, process)
        if process.rank == 0:
            verdict = compare(trial, reference, str(layout), TOLERANCE[config.parallel.precision])
            with open(folder / VERDICTS, "a") as file:
                file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
            outcome = "pass" if verdict.passed else "FAIL"
            print(f"{outcome}  {folder.name}  {layout}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
