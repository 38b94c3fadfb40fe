"""`omnizoo report`: the page of a run, drawn anew from its folder; or one page that compares several."""

from collections.abc import Sequence
from pathlib import Path

from omnizoo.config.errors import UserError
from omnizoo.training.metrics import RunFolder
from omnizoo.training.report import write_comparison, write_report


def report(folders: Sequence[Path], out: Path | None) -> int:
    runs = [RunFolder(folder) for folder in folders]
    for run in runs:
        if not run.metrics.exists():
            raise UserError(f"{run.root} is not the folder of a run (log.dir): it has no {run.metrics.name}")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; expected the name of an HTML file to write")
    try:
        if len(runs) == 1:
            written = write_report(runs[0], out=out)
        else:
            written = write_comparison(runs, out or Path("comparison.html"))
    except OSError as error:
        raise UserError(f"--out: {error.filename or out} cannot be written: {error.strerror}") from None
    print(f"written: {written}")
    return 0
