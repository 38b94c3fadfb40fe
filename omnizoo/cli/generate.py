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

MAX_PROMPT_LENGTH = 72  # with several prompts, at most this many characters of each are printed before its response
UNFINISHED = "\ufffd"  # ends a text whose last character is incomplete
# Control characters in generated text are removed, because they could control the terminal.
CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo generate`."""
    parser.add_argument(
        "model",
        metavar="MODEL_DIR",
        type=path_argument,
        help="Hugging Face folder, such as an export; or a run or checkpoint, which is exported temporarily",
    )
    parser.add_argument(
        "--messages",
        metavar="FILE",
        type=path_argument,
        help="JSON file with a list of messages, or JSONL file of rows with `messages`, both with media "
        "(default: --prompt)",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        default=[],
        help="message of the user, instead of --messages; may be repeated (default: --messages)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR|FILE.jsonl",
        type=path_argument,
        default=Path("generated"),
        help="folder for generated media, or JSONL file for all responses, with media next to it (default: generated)",
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, default=256, help="maximum number of generated tokens (default: 256)"
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=1.0,
        help="sampling temperature; 0: greedy decoding (default: 1.0)",
    )
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=int,
        default=0,
        help="number of most probable tokens to sample from; 0: all tokens (default: 0)",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="nucleus sampling: cumulative probability to sample from (default: 1.0)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--speaker", metavar="NAME", help="voice to generate with (default: that of the model)")
    parser.add_argument(
        "--no-speech", action="store_true", help="generation of text only, for models that can also speak"
    )
    allow_code(parser)


def run(args: argparse.Namespace) -> int:
    """Generate a response to each prompt, and return 0."""
    check_arguments(args)
    rows = list(args.prompt) if args.messages is None else read_messages(args.messages)
    with ExitStack() as stack:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # it would be printed between the responses
        folder = as_folder(args, stack)
        from omnizoo.generation.chat_model import load_chat_model
        from omnizoo.ops.device import pick_device

        model = load_chat_model(
            folder, pick_device(0), allow_code=args.allow_code, trust_remote_code=args.trust_remote_code
        )
        check_speech(args, model)
        if model.media.speaker_format is not None and args.speaker is not None:
            rows = [{"messages": [{"role": args.speaker, "content": prompt}]} for prompt in args.prompt]
        responses: TextIO | None = None
        if args.out.suffix == ".jsonl":
            args.out.parent.mkdir(parents=True, exist_ok=True)
            responses = stack.enter_context(args.out.open("w", encoding="utf-8"))
        for number, row in enumerate(rows):
            record = respond(model, row, number, len(rows), args)
            if responses is not None:
                responses.write(json.dumps(record, ensure_ascii=False) + "\n")
                responses.flush()
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `UserError` for values that argparse does not check."""
    if (args.messages is None) == (not args.prompt):
        raise UserError("--prompt: set one of --messages FILE and --prompt TEXT.")
    if not 0 <= args.temperature < math.inf:
        raise UserError(f"--temperature: {args.temperature}; expected a number >= 0")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p: {args.top_p}; expected a number > 0, <= 1")
    if args.top_k < 0:
        raise UserError(f"--top-k: {args.top_k}; expected an integer >= 0")
    if args.max_tokens < 1:
        raise UserError(f"--max-tokens: {args.max_tokens}; expected an integer >= 1")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed: {args.seed}; expected an integer from 0 to 2^63 - 1")
    check_out(args)


def check_out(args: argparse.Namespace) -> None:
    """Raise `UserError` if `--out` is neither a folder nor a JSONL file."""
    is_file = args.out.suffix == ".jsonl"
    if is_file and args.out.is_dir():
        raise UserError(f"--out: {args.out} is a folder; expected a JSONL file")
    if not is_file and args.out.exists() and not args.out.is_dir():
        raise UserError(
            f"--out: {args.out} is not a folder; expected a folder for generated media, or a name that ends in .jsonl"
        )


def check_speech(args: argparse.Namespace, model: "ChatModel") -> None:
    """Raise `UserError` if `--speaker` or `--no-speech` does not apply to this model."""
    speaker_format = model.media.speaker_format
    can_speak = bool(model.media.modules_of("follower")) or speaker_format is not None
    if args.speaker is not None and args.no_speech:
        raise UserError(f"--speaker: {args.speaker}, but --no-speech is also set. Remove one of them.")
    if args.speaker is not None and not can_speak:
        raise UserError(f"--speaker: {args.speaker}, but {args.model} cannot speak. Remove --speaker.")
    if speaker_format is not None and args.no_speech:
        raise UserError(f"--no-speech: {args.model} only speaks. Remove --no-speech.")
    if speaker_format is not None and args.speaker is not None and args.messages is not None:
        raise UserError(f"--speaker: {args.speaker}, but the `role` of each message is its speaker. Remove --speaker.")


def respond(model: "ChatModel", row: Any, number: int, num_rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Print the response to row `number` of `num_rows`, and return its record for the JSONL file."""
    import torch

    from omnizoo.modalities.sampling import Sampling

    is_only_prompt = num_rows == 1
    name = "the prompt" if is_only_prompt else row_name(number, args)
    prompt, prompt_text, expected = read_prompt(model, row, name, args)
    if not is_only_prompt:
        line = " ".join(prompt_text.split())
        ellipsis = "..." if len(line) > MAX_PROMPT_LENGTH else ""
        print(f"--- {line[:MAX_PROMPT_LENGTH]}{ellipsis}".translate(CONTROL))

    generator = torch.Generator(model.model.device).manual_seed(args.seed)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, generator)
    media_folder = args.out.with_suffix("") if args.out.suffix == ".jsonl" else args.out
    if not is_only_prompt:
        media_folder /= str(number)
    terminal = Terminal(model, media_folder)
    follower_options = None if args.no_speech else {"speaker": args.speaker}
    pieces = model.answer(prompt, sampling, args.max_tokens, terminal.show, follower_options)
    terminal.end()

    record = {"prompt": prompt_text, "answer": model.text(pieces)}
    if expected is not None:
        record["expected"] = expected
    return record | {"items": terminal.files}


def row_name(number: int, args: argparse.Namespace) -> str:
    """Return the name of a prompt in messages, counted from 1."""
    if args.messages:
        return f"--messages {args.messages}: row {number + 1}"
    return f"--prompt {number + 1}"


def read_prompt(
    model: "ChatModel", row: Any, name: str, args: argparse.Namespace
) -> tuple["RenderedRow", str, str | None]:
    """Return the rendered prompt, its text, and the expected response of the row, if it has one."""
    from omnizoo.data.rendering.template_limits import memory_limits
    from omnizoo.data.row import BadRow
    from omnizoo.data.sources.base import MediaFolder
    from omnizoo.modalities.media import BadMedia

    try:
        with memory_limits():
            if isinstance(row, str):
                return model.renderer.prompt(row), row, None
            media = MediaFolder(args.messages.parent if args.messages else Path(), None)
            question = model.renderer.question(row, media.find)
    except (BadRow, BadMedia) as reason:
        raise UserError(f"{name} cannot be used: {reason}") from None
    return question.prompt, question.shown, question.expected


class Terminal:
    """Prints pieces during generation: the new characters of a text, or the file name of a media item."""

    def __init__(self, model: "ChatModel", media_folder: Path) -> None:
        """Create a printer.

        Args:
            model: The model, which decodes text and saves media.
            media_folder: Folder for generated media.
        """
        self.model = model
        self.media_folder = media_folder
        self.piece: GeneratedPiece | None = None
        self.text = ""  # the part of the current piece that is already printed
        self.count = 0  # number of pieces shown
        self.files: list[str] = []

    def show(self, piece: "GeneratedPiece") -> None:
        """Print the new part of a text, or save a media item and print its file name."""
        if piece is not self.piece:
            self.end()
            self.piece = piece
            self.text = ""
            self.count += 1
        if piece.modality == "text":
            text = self.model.decode(piece)
            if not text.endswith(UNFINISHED):
                self._print(text)
            return
        file = self.model.save(piece, self.media_folder / str(self.count - 1))
        self.files.append(file)
        self._print(f"[{piece.modality}: {file}]")

    def end(self) -> None:
        """Finish the current piece."""
        if self.piece is None:
            return
        if self.piece.modality == "text":
            self._print(self.model.decode(self.piece))
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.piece = None

    def _print(self, text: str) -> None:
        """Print the characters of `text` that were not printed before."""
        new_text = text[len(self.text) :]
        sys.stdout.write(new_text.translate(CONTROL))
        sys.stdout.flush()
        self.text = text


def as_folder(args: argparse.Namespace, stack: ExitStack) -> Path:
    """Return the folder of the model. A run or checkpoint is exported to a temporary folder that `stack` deletes."""
    from omnizoo.checkpoint.resume import checkpoints_in, is_checkpoint

    path: Path = args.model
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    if not is_checkpoint(path) and not any(checkpoints_in(path).glob("step_*")):
        raise UserError(
            f"{path}: neither config.json nor a checkpoint found. Pass a Hugging Face folder, a run "
            "folder or a checkpoint."
        )
    from omnizoo.checkpoint.export import export, has_adapter
    from omnizoo.checkpoint.merge_adapter import base_weights

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omnizoo-"))) / "model"
    base = base_weights if has_adapter(path) else None
    exported = export(path, folder, allow_code=args.allow_code, trust_remote_code=args.trust_remote_code, base=base)
    merged = ", with its adapter merged," if base else ""
    print(f"{exported.checkpoint}{merged} is exported to a temporary folder", file=sys.stderr)
    return folder


def read_messages(path: Path) -> list[dict[str, Any]]:
    """Read rows from a JSON list of messages, an object with `messages`, or a JSONL file of such rows."""
    expected = "expected a list of messages, or an object with `messages`; in JSONL, one per line"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--messages {path}: cannot read the file: {error}") from None
    lines = [text]
    if path.suffix == ".jsonl":
        lines = [line for line in text.split("\n") if line.strip()]

    rows = []
    for number, line in enumerate(lines, start=1):
        line_suffix = f" line {number}" if len(lines) > 1 else ""
        origin = f"--messages {path}{line_suffix}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{origin}: not valid JSON: {error}") from None
        row = {"messages": value} if isinstance(value, list) else value
        if not isinstance(row, dict):
            raise UserError(f"{origin}: {expected}")
        rows.append(row)
    if not rows:
        raise UserError(f"--messages {path}: the file is empty; {expected}")
    return rows
