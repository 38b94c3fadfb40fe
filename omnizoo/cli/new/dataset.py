"""Find config settings that make the rows of a dataset usable.

The command tries rows. The error about a bad row may contain config values with which the row can be used
(`omnizoo.data.row.Fix`). These values are set, and the rows are tried again, until they can be used. Values that only
the user can choose become placeholders.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnizoo.cli.new.tools_template import TEMPLATE_KEY, template_fixes, write_template
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.config.sections.data import SourceSettings
from omnizoo.data.row import BadRow, Fix
from omnizoo.hub.resolve import with_values

if TYPE_CHECKING:
    from omnizoo.data.loading.reader import Reader
    from omnizoo.data.sources.base import RowSource
    from omnizoo.training.setup import ModelBundle

MAX_ROWS = 512  # maximum number of rows to try
MAX_BAD = 0.1  # maximum share of bad rows; the run will skip them
MAX_FOLDERS = 2000  # maximum number of folders in which media files are searched
CHARACTERS_PER_TOKEN = 4  # rough number for English text
SOURCE = "data.sources.0"
PLACEHOLDERS: dict[str, Any] = {
    f"{SOURCE}.columns": {"query": "CHOOSE_THE_PROMPT", "response": "CHOOSE_THE_RESPONSE"},
    f"{SOURCE}.media_dir": "CHOOSE_A_FOLDER",
}


@dataclass
class DatasetSettings:
    """Config sections that make the rows of a dataset usable, and the reasons for their values."""

    sections: dict[str, dict[str, Any]]  # `model`, `data`, and `train` if it sets the losses
    template_file: Path  # chat template to write if the rows cannot use the template of the tokenizer
    fixed: frozenset[str]  # keys from the command line; no fix changes them
    pins: dict[str, str]  # names on the hub with their commits, by key
    splits: tuple[str, str] | None  # names of the training and evaluation splits of the source
    comments: dict[str, str] = field(default_factory=dict)  # reason for each key that a fix has set
    choice: str = ""  # key of the source whose value the user must choose before training; empty if there is none

    @property
    def source(self) -> dict[str, Any]:
        """Settings of the source."""
        source: dict[str, Any] = self.sections["data"]["sources"][0]
        return source

    def config(self) -> Config:
        """Return the validated config for reading the rows."""
        return with_values(load_config(deepcopy(self.sections)), self.pins)

    def unread_source(self) -> SourceSettings:
        """Return the source with only its path. This is enough to open it without interpreting its rows."""
        return SourceSettings(path=self.pins.get(f"{SOURCE}.path", self.source.get("path")))

    def apply(self, fix: Fix) -> bool:
        """Set the key of a fix. Return whether this changed a value."""
        section, _, name = fix.key.partition(".")
        values = self.source if fix.key.startswith(f"{SOURCE}.") else self.sections.setdefault(section, {})
        name = name.rpartition(".")[2]
        if fix.key in self.fixed or fix.value is None:
            return False
        old = values.get(name)
        new = fix.value
        if isinstance(old, Mapping):
            new = {**fix.value, **old}
        elif isinstance(old, list):
            new = [*old, *(item for item in fix.value if item not in old)]
        elif old is not None:
            return False
        values[name] = new
        self.comments[fix.key] = fix.reason
        return bool(new != old)

    def set_placeholder(self, fix: Fix) -> None:
        """Set the key of a fix to a placeholder, because only the user can choose its value."""
        name = fix.key.rpartition(".")[2]
        self.source[name] = PLACEHOLDERS[fix.key]
        self.choice = name
        self.comments[fix.key] = fix.reason


@dataclass(frozen=True)
class FittedRows:
    """A reader whose rows can be used, and the lengths of the rows that were tried."""

    reader: "Reader"
    lengths: list[int]  # number of tokens of each tried row, sorted


def fit_settings(settings: DatasetSettings, bundle: "ModelBundle") -> FittedRows | None:
    """Change the settings until the rows can be used.

    Args:
        settings: The settings to change.
        bundle: The model and its tokenizer.

    Returns:
        The reader and the lengths of rows; None if the user has to choose a setting first.

    Raises:
        UserError: If many rows are bad for a reason that no setting changes.
    """
    while True:
        reader = _reader(settings, bundle)
        lengths = []
        bad_rows: list[tuple[str, BadRow]] = []
        is_changed = False
        for where, result in _tried_rows(reader, settings.template_file):
            if isinstance(result, int):
                lengths.append(result)
                continue
            if any(_apply(settings, fix, bundle.tokenizer) for fix in result.fixes):
                is_changed = True
                break
            bad_rows.append((where, result))
        if is_changed or _find_media(settings, bad_rows):
            continue
        if bad_rows and not _skips(settings, bad_rows, len(lengths)):
            _choose_or_raise(settings, bad_rows)
            return None
        return FittedRows(_reader(settings, bundle), sorted(lengths))


def _apply(settings: DatasetSettings, fix: Fix, tokenizer: Any) -> bool:
    """Apply a fix. If it sets a chat template, write the template to a file. Return whether a config value changed."""
    if not settings.apply(fix):
        return False
    if fix.key == TEMPLATE_KEY:
        write_template(settings.template_file, tokenizer)
    return True


def _skips(settings: DatasetSettings, bad_rows: Sequence[tuple[str, BadRow]], num_good: int) -> bool:
    """Set `data.on_bad_row: skip` if only a few rows are bad. Return whether the config skips bad rows."""
    is_set = settings.sections["data"].get("on_bad_row") == "skip"
    num_rows = num_good + len(bad_rows)
    if is_set or len(bad_rows) > MAX_BAD * num_rows:
        return is_set and num_good > 0
    where, bad = bad_rows[0]
    reason = f"{len(bad_rows)} of {num_rows} tried rows are bad, such as {where}: {bad}"
    return settings.apply(Fix("data.on_bad_row", "skip", reason))


def _reader(settings: DatasetSettings, bundle: "ModelBundle") -> "Reader":
    """Return a reader of the rows with the current settings."""
    from omnizoo.data.loading.reader import build_reader
    from omnizoo.models.chat_tokenizer import load_chat_tokenizer

    config = settings.config()
    return build_reader(config, load_chat_tokenizer(config), **bundle.media)


def _tried_rows(reader: "Reader", template_file: Path) -> Iterator[tuple[str, int | BadRow]]:
    """Try rows. For each row, yield its location and either its length in tokens or an error with fixes."""
    source = reader.sources[0]
    num_copies = 2 if reader.config.mismatched_answers else 1  # each prompt also gets the response of another row
    renderer = reader.text_renderer
    for number in tried_numbers(len(source)):
        where = source.where(number)
        row: dict[str, Any] = {}
        try:
            row = source.read(number)
            samples = renderer.render_samples(row, (0, 0, number), _finder(source, number))
        except BadRow as bad:
            has_template = bool(renderer.tokenizer.chat_template)
            fixes = template_fixes(renderer.tokenizer, row, template_file) if has_template else []
            yield where, BadRow(str(bad), [*bad.fixes, *fixes])
        except UserError as error:
            if renderer.tokenizer.chat_template:
                raise
            yield where, BadRow(str(error), template_fixes(renderer.tokenizer, row, template_file))
        else:
            yield where, num_copies * max(map(len, samples))


def _finder(source: Any, number: int) -> Any:
    """Return the function that finds the media files of a row."""
    return lambda name: source.find(number, name)


def tried_numbers(num_rows: int) -> Sequence[int]:
    """Return the numbers of the rows to try: the first ones, and others at equal distances."""
    if num_rows <= MAX_ROWS:
        return range(num_rows)
    half = MAX_ROWS // 2
    return [*range(half), *(half + i * (num_rows - half) // half for i in range(half))]


def _find_media(settings: DatasetSettings, bad_rows: Sequence[tuple[str, BadRow]]) -> bool:
    """Set `media_dir` to a folder near the data that contains the missing media files. Return whether it was set."""
    key = f"{SOURCE}.media_dir"
    names = [fix.file for _, bad in bad_rows for fix in bad.fixes if fix.key == key]
    path = settings.source.get("path")
    if not names or path is None or settings.source.get("media_dir") is not None:
        return False
    folder = folder_with(names[0], Path(path).expanduser())
    return folder is not None and settings.apply(Fix(key, folder, f"the folder that has {names[0]}"))


def folder_with(name: str, data: Path) -> str | None:
    """Return the folder near the data that contains the file `name`; None if there is none.

    The search covers the folder of the data with its subfolders, then the parent folder with all of its subfolders.
    Folders with fewer levels come first.
    """
    if not data.exists():
        return None  # the rows are not on this machine
    start = data if data.is_dir() else data.parent
    for root in (start, start.resolve().parent):
        folders = [root]
        for folder in folders:  # the list grows during the search
            if (folder / name).is_file():
                return str(folder) if data.is_absolute() else os.path.relpath(folder)
            if len(folders) < MAX_FOLDERS:
                folders += _subfolders(folder)
    return None


def _subfolders(folder: Path) -> list[Path]:
    """Return the sorted subfolders of a folder, without hidden folders and symbolic links."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def _choose_or_raise(settings: DatasetSettings, bad_rows: Sequence[tuple[str, BadRow]]) -> None:
    """Set the key that the first bad row needs to a placeholder. Raises `UserError` if no key would fix the row."""
    where, bad = bad_rows[0]
    for fix in bad.fixes:
        if fix.key in PLACEHOLDERS and fix.key not in settings.fixed:
            settings.set_placeholder(fix)
            return
    raise UserError(f"{where}: {bad}")


def estimated_lengths(source: "RowSource") -> list[int]:
    """Return sorted estimates of the lengths of rows in tokens, for rows that cannot be rendered yet."""
    lengths = []
    for number in tried_numbers(len(source)):
        try:
            lengths.append(max(1, len(str(source.read(number))) // CHARACTERS_PER_TOKEN))
        except BadRow:
            continue
    return sorted(lengths) or [1]
