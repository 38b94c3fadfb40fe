"""`omnizoo generate`: print responses during generation, and save generated media as files.

Each prompt has its own random generator, so its response does not depend on the other prompts.
"""

import argparse
import json
import math
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from omnizoo.cli.parser import allow_code, path_argument
from omnizoo.config.errors import UserError

if TYPE_CHECKING:
    from omnizoo.data.sample import RenderedRow
    from omnizoo.generation.chat_model import ChatModel
    from omnizoo.generation.generate import GeneratedPiece

SHOWN = 72  # characters of a prompt printed before its response, if there are several prompts
UNFINISHED = "\ufffd"  # ends a text whose last character is incomplete
# Control characters that a model generates are removed: they could control the terminal.
CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL_DIR",
        type=path_argument,
        help="Hugging Face folder, as `export` writes it; or a run or checkpoint, which is exported temporarily",
    )
    parser.add_argument(
        "--messages",
        metavar="FILE",
        type=path_argument,
        help="JSON: a list of messages, media included; JSONL: rows with `messages`",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", default=[], help="message of the user; may be repeated"
    )
    parser.add_argument(
        "--out",
        metavar="DIR|FILE.jsonl",
        type=path_argument,
        default=Path("generated"),
        help="folder for generated media (default: generated); or JSONL file for all responses, with media next to it",
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, default=256, help="maximum number of generated tokens (default: 256)"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=1.0, help="sampling temperature; 0: greedy (default: 1.0)"
    )
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=int,
        default=0,
        help="number of likeliest tokens to sample from; 0: all (default)",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="nucleus sampling: cumulative probability to sample from (default: 1.0)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--speaker", metavar="NAME", help="voice of a model that speaks")
    parser.add_argument("--no-speech", action="store_true", help="text only, for models that speak")
    allow_code(parser)


def run(args: argparse.Namespace) -> int:
    check_arguments(args)
    rows = list(args.prompt) if args.messages is None else read_messages(args.messages)
    with ExitStack() as stack:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # it would be printed between the responses
        folder = as_folder(args, stack)
        from omnizoo.generation.chat_model import load_chat_model
        from omnizoo.ops.device import pick_device

        writer = load_chat_model(
            folder, pick_device(0), allow_code=args.allow_code, trust_remote_code=args.trust_remote_code
        )
        check_speech(args, writer)
        if writer.media.speaker_format is not None and args.speaker is not None:
            rows = [{"messages": [{"role": args.speaker, "content": prompt}]} for prompt in args.prompt]
        responses: TextIO | None = None
        if args.out.suffix == ".jsonl":
            args.out.parent.mkdir(parents=True, exist_ok=True)
            responses = stack.enter_context(args.out.open("w", encoding="utf-8"))
        for number, row in enumerate(rows):
            record = respond(writer, row, number, len(rows), args)
            if responses is not None:
                responses.write(json.dumps(record, ensure_ascii=False) + "\n")
                responses.flush()
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    if (args.messages is None) == (not args.prompt):
        raise UserError("give one of --messages FILE and --prompt TEXT")
    if (
        not 0 <= args.temperature < math.inf
        or not 0 < args.top_p <= 1
        or args.top_k < 0
        or args.max_tokens < 1
        or not 0 <= args.seed < 2**63
    ):
        raise UserError(
            "--temperature is at least 0, --top-p in (0, 1], --top-k at least 0, --max-tokens at least 1, "
            "--seed 0 to 2^63 - 1"
        )
    is_file = args.out.suffix == ".jsonl"
    if is_file and args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder; expected a JSONL file")
    if not is_file and args.out.exists() and not args.out.is_dir():
        raise UserError(
            f"--out {args.out} is not a folder; expected one for what the model produces, or a name that ends in .jsonl"
        )


def check_speech(args: argparse.Namespace, writer: "ChatModel") -> None:
    """Raise `UserError` if `--speaker` or `--no-speech` does not apply to this model."""
    turns = writer.media.speaker_format
    if args.speaker is not None and args.no_speech:
        raise UserError(f"--speaker {args.speaker}: --no-speech says that nothing is said; leave it out")
    if args.speaker is not None and not (writer.media.modules_of("follower") or turns):
        raise UserError(f"--speaker {args.speaker}: the model of {args.model} does not speak; leave it out")
    if turns is not None and args.no_speech:
        raise UserError(f"--no-speech: the model of {args.model} does nothing but speak; leave it out")
    if turns is not None and args.speaker is not None and args.messages is not None:
        raise UserError(f"--speaker {args.speaker}: the messages name who speaks (`role`); leave it out")


def respond(writer: "ChatModel", row: Any, number: int, num_rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Print the response to row `number` of `num_rows`, and return its record for the JSONL file."""
    import torch

    from omnizoo.modalities.sampling import Sampling

    is_alone = num_rows == 1
    prompt, shown, expected = read_prompt(writer, row, "the prompt" if is_alone else row_name(number, args), args)
    if not is_alone:
        line = " ".join(shown.split())
        ellipsis = "..." if len(line) > SHOWN else ""
        print(f"--- {line[:SHOWN]}{ellipsis}".translate(CONTROL))
    generator = torch.Generator(writer.model.device).manual_seed(args.seed)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, generator)
    media_folder = args.out.with_suffix("") if args.out.suffix == ".jsonl" else args.out
    terminal = Terminal(writer, media_folder if is_alone else media_folder / str(number))
    follower_options = None if args.no_speech else {"speaker": args.speaker}
    pieces = writer.answer(prompt, sampling, args.max_tokens, terminal.show, follower_options)
    terminal.end()
    record = {"prompt": shown, "answer": writer.text(pieces)}
    if expected is not None:
        record["expected"] = expected
    return record | {"items": terminal.files}


def row_name(number: int, args: argparse.Namespace) -> str:
    return f"--messages {args.messages}: row {number + 1}" if args.messages else f"--prompt {number + 1}"


def read_prompt(
    writer: "ChatModel", row: Any, name: str, args: argparse.Namespace
) -> tuple["RenderedRow", str, str | None]:
    """Return the rendered prompt, its text, and the expected response of the row, if it has one."""
    from omnizoo.data.rendering.template_limits import memory_limits
    from omnizoo.data.row import BadRow
    from omnizoo.data.sources.base import MediaFolder
    from omnizoo.modalities.media import BadMedia

    try:
        with memory_limits():
            if isinstance(row, str):
                return writer.renderer.prompt(row), row, None
            media = MediaFolder(args.messages.parent if args.messages else Path(), None)
            question = writer.renderer.question(row, media.find)
    except (BadRow, BadMedia) as reason:
        raise UserError(f"{name} cannot be used: {reason}") from None
    return question.prompt, question.shown, question.expected


class Terminal:
    """Printer of pieces during generation: new characters of text, and file names of media."""

    def __init__(self, writer: "ChatModel", items: Path) -> None:
        self.writer, self.items = writer, items
        self.piece: GeneratedPiece | None = None
        self.text = ""  # text of the current piece that is already printed
        self.count = 0  # number of pieces
        self.files: list[str] = []

    def show(self, piece: "GeneratedPiece") -> None:
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
        """Finish the current piece."""
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


def as_folder(args: argparse.Namespace, stack: ExitStack) -> Path:
    """Return the folder of the model. A run or checkpoint is exported to a temporary folder that `stack` deletes."""
    from omnizoo.checkpoint.resume import checkpoints_in, is_checkpoint

    path: Path = args.model
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    if not is_checkpoint(path) and not any(checkpoints_in(path).glob("step_*")):
        raise UserError(f"{path} is neither a Hugging Face folder (config.json) nor a run or a checkpoint (step_...)")
    from omnizoo.checkpoint.export import export, has_adapter
    from omnizoo.checkpoint.merge_adapter import base_weights

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omnizoo-"))) / "model"
    base = base_weights if has_adapter(path) else None
    exported = export(path, folder, allow_code=args.allow_code, trust_remote_code=args.trust_remote_code, base=base)
    merged = ", its adapter merged," if base else ""
    print(f"{exported.checkpoint}{merged} is exported to a temporary folder for this", file=sys.stderr)
    return folder


def read_messages(path: Path) -> list[dict[str, Any]]:
    """Read rows from a JSON list of messages, an object with `messages`, or a JSONL file of such rows."""
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
