"""`omnizoo generate`: what a model answers; text on the terminal as it is written, everything else as files.

Each prompt is answered by itself, with a random generator of its own: the answer does not depend on its company.
"""

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from omnizoo.config.errors import UserError

if TYPE_CHECKING:
    from omnizoo.assembly.writer import Writer
    from omnizoo.models.generate import Piece

SHOWN = 72  # characters of a prompt, where there are several
UNFINISHED = "\ufffd"  # the first bytes of a character whose others are still to come
# A model may write anything: what moves the cursor or talks to the terminal is left out.
CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


@dataclass(frozen=True)
class Drawing:
    """How answers are drawn."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    followed: dict[str, Any] | None = None  # options of what follows the text; None: nothing does

    def check(self) -> None:
        if (
            not 0 <= self.temperature < math.inf
            or not 0 < self.top_p <= 1
            or self.top_k < 0
            or self.max_tokens < 1
            or not 0 <= self.seed < 2**63
        ):
            raise UserError(
                "--temperature is at least 0, --top-p in (0, 1], --top-k at least 0, --max-tokens at least 1, "
                "--seed 0 to 2^63 - 1"
            )


def generate(
    folder: Path,
    messages: Path | None,
    prompts: Sequence[str],
    out: Path,
    drawing: Drawing,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
    speaker: str | None = None,
    no_speech: bool = False,
) -> int:
    if (messages is None) == (not prompts):
        raise UserError("give one of --messages FILE and --prompt TEXT")
    drawing.check()
    is_file = out.suffix == ".jsonl"
    if out.exists() and out.is_dir() == is_file:
        wanted = "a JSONL file" if is_file else "one for what the model produces, or a name that ends in .jsonl"
        raise UserError(f"--out {out} is {'a' if is_file else 'not a'} folder; expected {wanted}")
    rows: list[Any] = list(prompts) if messages is None else read_messages(messages)

    with ExitStack() as stack:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # they would stand between the answers
        own = as_folder(folder, stack, allow_code, trust_remote_code)
        from omnizoo.assembly.writer import load_writer
        from omnizoo.data.rows import Folder
        from omnizoo.ops.device import pick_device

        writer = load_writer(own, pick_device(0), allow_code=allow_code, trust_remote_code=trust_remote_code)
        turns = writer.media.turns
        if speaker is not None and (no_speech or not (writer.media.followers or turns)):
            what = "--no-speech says that nothing is said" if no_speech else f"the model of {folder} does not speak"
            raise UserError(f"--speaker {speaker}: {what}; leave it out")
        if turns is not None and no_speech:
            raise UserError(f"--no-speech: the model of {folder} does nothing but speak; leave it out")
        if turns is not None and speaker is not None:
            if messages is not None:
                raise UserError(f"--speaker {speaker}: the messages name who speaks (`role`); leave it out")
            rows = [{"messages": [{"role": speaker, "content": prompt}]} for prompt in prompts]
        drawing = replace(drawing, followed=None if no_speech else {"speaker": speaker})
        where = Folder(messages.parent if messages else Path(), None)
        answers: TextIO | None = None
        if is_file:
            out.parent.mkdir(parents=True, exist_ok=True)
            answers = stack.enter_context(out.open("w", encoding="utf-8"))
        items = out.with_suffix("") if is_file else out
        for number, row in enumerate(rows):
            name = f"--messages {messages}: row {number + 1}" if messages else f"--prompt {number + 1}"
            record = _answer(writer, row, name, where, drawing, items / str(number) if len(rows) > 1 else items, rows)
            if answers is not None:
                answers.write(json.dumps(record, ensure_ascii=False) + "\n")
                answers.flush()
    return 0


def _answer(
    writer: "Writer", row: Any, name: str, where: Any, drawing: Drawing, items: Path, rows: Sequence[Any]
) -> dict[str, Any]:
    """Answer one prompt on the terminal; what `--out` gets of it."""
    import torch

    from omnizoo.data.rows import BadRow
    from omnizoo.modalities.base import Sampling
    from omnizoo.modalities.item import BadMedia

    try:
        if isinstance(row, str):
            prompt, shown, expected = writer.renderer.prompt(row), row, None
        else:
            question = writer.renderer.question(row, where.find)
            prompt, shown, expected = question.prompt, question.shown, question.expected
    except (BadRow, BadMedia) as reason:
        raise UserError(f"{name if len(rows) > 1 else 'the prompt'} cannot be used: {reason}") from None
    if len(rows) > 1:
        line = " ".join(shown.split())
        print(f"--- {line[:SHOWN]}{'...' if len(line) > SHOWN else ''}".translate(CONTROL))
    generator = torch.Generator(writer.model.device).manual_seed(drawing.seed)
    sampling = Sampling(drawing.temperature, drawing.top_k, drawing.top_p, generator)
    terminal = Terminal(writer, items)
    pieces = writer.answer(prompt, sampling, drawing.max_tokens, terminal.show, drawing.followed)
    terminal.end()
    answered = {"prompt": shown, "answer": writer.text(pieces)}
    return answered | ({} if expected is None else {"expected": expected}) | {"items": terminal.files}


class Terminal:
    """Shows pieces as they grow: text by its new characters, items by the file they are saved to."""

    def __init__(self, writer: "Writer", items: Path) -> None:
        self.writer, self.items = writer, items
        self.piece: Piece | None = None
        self.text = ""  # of the piece, as far as it is shown
        self.count = 0  # pieces
        self.files: list[str] = []

    def show(self, piece: "Piece") -> None:
        if piece is not self.piece:
            self.end()
            self.piece, self.text = piece, ""
            self.count += 1
        if piece.modality == "text":
            text = self.writer.decode(piece)
            if not text.endswith(UNFINISHED):
                self._print(text)
            return
        self.files.append(self.writer.save(piece, self.items / str(self.count - 1)))
        self._print(f"[{piece.modality}: {self.files[-1]}]")

    def end(self) -> None:
        """The end of the piece, or of all of them."""
        if self.piece is None:
            return
        if self.piece.modality == "text":
            self._print(self.writer.decode(self.piece))
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.piece = None

    def _print(self, text: str) -> None:
        sys.stdout.write(text[len(self.text) :].translate(CONTROL))
        sys.stdout.flush()
        self.text = text


def as_folder(path: Path, stack: ExitStack, allow_code: Sequence[str], trust_remote_code: bool) -> Path:
    """`path` if it is a Hugging Face folder; of a run or a checkpoint, an export that lasts as long as `stack`."""
    from omnizoo.checkpoint.start import checkpoints_in, is_checkpoint

    if not path.is_dir() or (path / "config.json").is_file():
        return path
    if not is_checkpoint(path) and not any(checkpoints_in(path).glob("step_*")):
        raise UserError(f"{path} is neither a Hugging Face folder (config.json) nor a run or a checkpoint (step_...)")
    from omnizoo.assembly.adapters import base_weights
    from omnizoo.checkpoint.export import export, has_adapter

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omnizoo-"))) / "model"
    base = base_weights if has_adapter(path) else None
    exported = export(path, folder, None, False, allow_code, trust_remote_code, base=base)
    merged = ", its adapter merged," if base else ""
    print(f"{exported.checkpoint}{merged} is exported to a temporary folder for this", file=sys.stderr)
    return folder


def read_messages(path: Path) -> list[dict[str, Any]]:
    """A JSON list of messages, a row (an object with `messages`), or such rows, one on each line (JSONL)."""
    wanted = "a list of messages was expected, or an object with `messages`; in JSONL, one on each line"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--messages {path}: cannot be read: {error}") from None
    lines = [text]
    if path.suffix == ".jsonl":
        lines = [line for line in text.split("\n") if line.strip()]
    rows = []
    for number, line in enumerate(lines, start=1):
        where = f"--messages {path}" + (f" line {number}" if len(lines) > 1 else "")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: cannot be read as JSON: {error}") from None
        row = {"messages": value} if isinstance(value, list) else value
        if not isinstance(row, dict):
            raise UserError(f"{where}: {wanted}")
        rows.append(row)
    if not rows:
        raise UserError(f"--messages {path} is empty: {wanted}")
    return rows
