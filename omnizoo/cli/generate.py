"""`omnizoo generate`: print responses during generation, and save generated media as files.

Each prompt has its own random generator, so its response does not depend on the other prompts.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from omnizoo.cli.parser import allow_code, path_argument
from omnizoo.config.errors import UserError

if TYPE_CHECKING:
    from omnizoo.data.sample import RenderedRow
    from omnizoo.generation.chat_model import ChatModel, Request
    from omnizoo.generation.diffusion.source import PipelineSource
    from omnizoo.generation.generate import GeneratedPiece, Outcome
    from omnizoo.reporting.results import GeneratedResponse

MAX_PROMPT_LENGTH = 72  # characters of each prompt that are printed before its response, if there are several prompts
PIPELINE_SETTINGS = {"messages", "out", "seed", "pipeline", "base"}  # settings that a pipeline of diffusers uses
UNFINISHED = "\ufffd"  # replacement character; tokenizers return it for an incomplete last character
# Control characters in generated text are removed, because they could control the terminal.
CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo generate`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=path_argument,
        help="Hugging Face folder, such as an export; ORG/NAME on the hub; adapter folder (merged into its base "
        "model); or run or checkpoint (exported temporarily)",
    )
    parser.add_argument(
        "--messages",
        metavar="FILE",
        type=path_argument,
        help="JSON file with a list of messages, or JSONL file whose rows have `messages`; messages may contain media "
        "(default: the text in --prompt)",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        default=[],
        help="user message; if the option is repeated, each message gets a response (default: the file in --messages)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR|FILE.jsonl",
        type=path_argument,
        default=Path("generated"),
        help="folder for generated media, or JSONL file for all responses, with a folder for media next to it "
        "(default: generated)",
    )
    _add_sampling(parser)
    parser.add_argument(
        "--batch",
        metavar="N",
        type=int,
        default=8,
        help="maximum number of responses to generate at once; higher values need more memory (default: 8)",
    )
    parser.add_argument(
        "--pipeline",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="argument of the pipeline of a diffusion transformer, such as num_inference_steps=20; may be repeated "
        "(default: those of its family)",
    )
    parser.add_argument("--speaker", metavar="NAME", help="voice to generate with (default: the model's default voice)")
    parser.add_argument("--no-speech", action="store_true", help="generate only text, even if the model can also speak")
    parser.add_argument(
        "--base",
        metavar="DIR",
        help="folder of the base model of an adapter folder (default: the folder that adapter_config.json names)",
    )
    parser.add_argument(
        "--recipe",
        metavar="MODULE:NAME",
        help="recipe for a model family without a built-in one (default: the recipe of the run, which --allow-code "
        "must permit)",
    )
    allow_code(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that determine how tokens are sampled."""
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
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="random seed, the same for each response (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a response to each prompt, and write media and the JSONL file. Returns 0."""
    fields = {name: value for name, value in vars(args).items() if name in GenerateSettings.__dataclass_fields__}
    settings = GenerateSettings(**fields)
    if (settings.messages is None) == (not args.prompt):
        raise UserError("--prompt: set one of --messages FILE and --prompt TEXT.")
    rows = list(args.prompt) if settings.messages is None else read_messages(settings.messages)
    generate_responses(args.model, rows, settings, is_printed=True)
    return 0


def generate(
    model: str | Path,
    prompts: str | Sequence[str | Mapping[str, Any]],
    *,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch: int = 8,
    out: str | Path = "generated",
    speaker: str | None = None,
    speech: bool = True,
    pipeline: Mapping[str, Any] | None = None,
    base: str | None = None,
    recipe: str | None = None,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> "list[GeneratedResponse]":
    """Generate a response to each prompt.

    Args:
        model: Hugging Face folder, such as an export; adapter folder; run folder or checkpoint.
        prompts: User messages as text, or rows with `messages` and media. Media paths are relative to the working
            directory.
        max_tokens: Maximum number of generated tokens.
        temperature: Sampling temperature; 0 for greedy decoding.
        top_k: Number of most probable tokens to sample from; 0 for all tokens.
        top_p: Cumulative probability to sample from.
        seed: Random seed of each response.
        batch: Maximum number of responses to generate at once.
        out: Folder for generated media, or JSONL file for all responses, with a folder for media next to it.
        speaker: Voice of generated speech. Default: chosen by the model.
        speech: Whether models that can speak generate speech.
        pipeline: Arguments of the pipeline of a diffusion transformer, such as `num_inference_steps`.
        base: Folder of the base model of an adapter folder.
        recipe: `package.module:NAME` of the recipe for a model family without a built-in one.
        allow_code: Python modules that the folder may import encoders and decoders from, including their submodules.
        trust_remote_code: Whether Python code in the model folder may run.

    Returns:
        A response for each prompt, in the same order.

    Raises:
        UserError: If the folder, a setting or a prompt cannot be used.

    Example:
        >>> [response] = omnizoo.generate("runs/my", ["What is 2 plus 3?"], temperature=0)
        >>> response.text
    """
    from omnizoo.reporting.results import GeneratedResponse

    rows = [prompts] if isinstance(prompts, str) else list(prompts)
    for number, row in enumerate(rows):
        if not isinstance(row, str | Mapping):
            raise UserError(f"prompts[{number}]: {type(row).__name__}; expected text, or a row with `messages`")
    settings = GenerateSettings(
        out=Path(out),
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        batch=batch,
        speaker=speaker,
        no_speech=not speech,
        pipeline=[f"{name}={json.dumps(value)}" for name, value in (pipeline or {}).items()],
        base=base,
        recipe=recipe,
        allow_code=allow_code,
        trust_remote_code=trust_remote_code,
    )
    responses = []
    for record in generate_responses(Path(model), rows, settings):
        files = [Path(file) for file in record["items"]]
        responses.append(GeneratedResponse(record["prompt"], record["answer"], record.get("expected"), files))
    return responses


@dataclass(frozen=True)
class GenerateSettings:
    """Settings of `omnizoo generate`. The help texts of its flags describe them."""

    messages: Path | None = None  # file of the rows
    out: Path = Path("generated")
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    batch: int = 8
    speaker: str | None = None
    no_speech: bool = False
    pipeline: Sequence[str] = ()
    base: str | None = None
    recipe: str | None = None
    allow_code: Sequence[str] = ()
    trust_remote_code: bool = False


def generate_responses(
    folder: Path, rows: Sequence[str | Mapping[str, Any]], settings: GenerateSettings, is_printed: bool = False
) -> list[dict[str, Any]]:
    """Generate a response to each prompt.

    Args:
        folder: Hugging Face folder, adapter folder, run folder or checkpoint.
        rows: Prompts, as text or as rows with messages.
        settings: Sampling and permissions.
        is_printed: Whether to print the responses.

    Returns:
        A record for each prompt, with `prompt`, `answer`, `expected` (if the row has one) and `items`, the files of
        generated media.

    Raises:
        UserError: If the settings, the folder or a prompt cannot be used.
    """
    check_settings(settings)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # progress bars would appear between the responses
    from omnizoo.generation.chat_model import chat_model_of
    from omnizoo.generation.diffusion.source import find_pipeline
    from omnizoo.generation.model_folder import FolderOptions, model_section
    from omnizoo.ops.device import pick_device

    options = FolderOptions(settings.allow_code, settings.trust_remote_code, settings.recipe, settings.base)
    note = print_note if is_printed else lambda line: None
    with ExitStack() as stack:
        file: TextIO | None = None
        source = find_pipeline(folder, settings.base, note)
        if source is not None:
            file = open_out(settings.out, stack)
            return run_pipeline(source, rows, settings, is_printed, file)
        if settings.pipeline:
            raise UserError(
                f"--pipeline: {settings.pipeline[0]}, but {folder} is not a pipeline of diffusers. Remove it."
            )
        spec = stack.enter_context(model_section(folder, options, note))
        model = chat_model_of(spec, pick_device(0))
        has_only_text = all(isinstance(row, str) for row in rows)
        check_speech(folder, settings, model, has_only_text)
        if model.media.speaker_format is not None and settings.speaker is not None:
            rows = [{"messages": [{"role": settings.speaker, "content": prompt}]} for prompt in rows]
        file = open_out(settings.out, stack)
        return Responder(model, rows, settings, is_printed, file).run()


def open_out(out: Path, stack: ExitStack) -> TextIO | None:
    """Open the JSONL file of `--out` until the stack is closed. Return None if `--out` is a folder."""
    if out.suffix != ".jsonl":
        return None
    out.parent.mkdir(parents=True, exist_ok=True)
    return stack.enter_context(out.open("w", encoding="utf-8"))


def run_pipeline(
    source: "PipelineSource",
    rows: Sequence[str | Mapping[str, Any]],
    settings: GenerateSettings,
    is_printed: bool,
    file: TextIO | None,
) -> list[dict[str, Any]]:
    """Generate media for each prompt with a pipeline of diffusers, and return their records."""
    from omnizoo.generation.diffusion.prompts import generate_media, parse_arguments
    from omnizoo.ops.device import pick_device

    defaults = GenerateSettings()
    for name in GenerateSettings.__dataclass_fields__:
        if name not in PIPELINE_SETTINGS and getattr(settings, name) != getattr(defaults, name):
            option = name.replace("_", "-")
            raise UserError(f"--{option}: a pipeline of diffusers does not use it. Use --pipeline NAME=VALUE.")
    out = settings.out.with_suffix("") if file is not None else settings.out
    media_root = settings.messages.parent if settings.messages else Path()
    records = []
    for record in generate_media(
        source,
        rows,
        parse_arguments(settings.pipeline),
        settings.seed,
        out,
        media_root,
        pick_device(0),
        write_stdout if is_printed else lambda text: None,
    ):
        records.append(record)
        if file is not None:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
    return records


def print_note(line: str) -> None:
    """Print a line to stderr, because it is not part of the responses."""
    print(line, file=sys.stderr)


def check_settings(args: GenerateSettings) -> None:
    """Raise `UserError` for values that argparse does not check."""
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
    if args.batch < 1:
        raise UserError(f"--batch: {args.batch}; expected an integer >= 1")
    check_out(args)


def check_out(args: GenerateSettings) -> None:
    """Raise `UserError` if `--out` is neither a folder nor a JSONL file."""
    is_file = args.out.suffix == ".jsonl"
    if is_file and args.out.is_dir():
        raise UserError(f"--out: {args.out} is a folder; expected a JSONL file")
    if not is_file and args.out.exists() and not args.out.is_dir():
        raise UserError(
            f"--out: {args.out} is not a folder; expected a folder for generated media, or a name that ends in .jsonl"
        )


def check_speech(folder: Path, args: GenerateSettings, model: "ChatModel", has_only_text: bool) -> None:
    """Raise `UserError` if `--speaker` or `--no-speech` does not apply to this model."""
    speaker_format = model.media.speaker_format
    can_speak = bool(model.media.modules_of("follower")) or speaker_format is not None
    if args.speaker is not None and args.no_speech:
        raise UserError(f"--speaker: {args.speaker}, but --no-speech is also set. Remove one of them.")
    if args.speaker is not None and not can_speak:
        raise UserError(f"--speaker: {args.speaker}, but {folder} cannot speak. Remove --speaker.")
    if speaker_format is not None and args.no_speech:
        raise UserError(f"--no-speech: {folder} can only speak. Remove --no-speech.")
    if speaker_format is not None and args.speaker is not None and not has_only_text:
        raise UserError(f"--speaker: {args.speaker}, but the `role` of each message is its speaker. Remove --speaker.")


@dataclass(frozen=True)
class PromptOfRow:
    """A rendered prompt, its text, and the expected response of the row, if any."""

    prompt: "RenderedRow"
    text: str
    expected: str | None


class Responder:
    """Generates the responses to all prompts, and prints and writes them in the order of the prompts."""

    def __init__(
        self,
        model: "ChatModel",
        rows: Sequence[Any],
        settings: GenerateSettings,
        is_printed: bool,
        file: TextIO | None,
    ) -> None:
        """Render the prompts.

        Args:
            model: The model.
            rows: Prompts, as text or as rows with messages.
            settings: Sampling and output.
            is_printed: Whether to print the responses.
            file: JSONL file to write the responses to; None if they are not written.

        Raises:
            UserError: If a prompt cannot be used.
        """
        self.model = model
        self.settings = settings
        self.file = file
        self.is_single = len(rows) == 1
        self.prompts = [self._read(row, number) for number, row in enumerate(rows)]
        self.terminals = [self._terminal(number, is_printed) for number in range(len(rows))]

    def run(self) -> list[dict[str, Any]]:
        """Generate the responses, and return their records."""
        # A response that is generated alone is printed while it grows. Responses of a batch are printed when they are
        # complete, in the order of the prompts.
        is_streamed = self.is_single or self.settings.batch == 1
        requests = (self._request(number, is_streamed) for number in range(len(self.prompts)))
        follower_options = None if self.settings.no_speech else {"speaker": self.settings.speaker}
        finished: dict[int, Outcome] = {}
        records: list[dict[str, Any]] = []
        outcomes = self.model.answers(requests, self.settings.max_tokens, self.settings.batch, follower_options)
        for number, outcome in outcomes:
            finished[number] = outcome
            while len(records) in finished:
                next_number = len(records)
                records.append(self._end(next_number, finished.pop(next_number), is_streamed))
        return records

    def _read(self, row: Any, number: int) -> PromptOfRow:
        """Render the prompt of a row. Raises `UserError` if the row or its media cannot be used."""
        from omnizoo.data.rendering.template_limits import memory_limits
        from omnizoo.data.row import BadRow
        from omnizoo.data.sources.base import MediaFolder
        from omnizoo.modalities.media import BadMedia

        messages = self.settings.messages
        try:
            with memory_limits():
                if isinstance(row, str):
                    return PromptOfRow(self.model.renderer.prompt(row), row, None)
                media = MediaFolder(messages.parent if messages else Path(), None)
                question = self.model.renderer.question(row, media.find)
        except (BadRow, BadMedia) as reason:
            raise UserError(f"{self._name(number)} cannot be used: {reason}{self.model.recipe_hint()}") from None
        return PromptOfRow(question.prompt, question.shown, question.expected)

    def _name(self, number: int) -> str:
        """Return how error messages refer to a prompt. Its number is counted from 1."""
        if self.is_single:
            return "the prompt"
        if self.settings.messages:
            return f"--messages {self.settings.messages}: row {number + 1}"
        return f"--prompt {number + 1}"

    def _terminal(self, number: int, is_printed: bool) -> "Terminal":
        """Return the object that prints a response and saves its media."""
        out = self.settings.out
        media_folder = out.with_suffix("") if out.suffix == ".jsonl" else out
        if not self.is_single:
            media_folder /= str(number)
        return Terminal(self.model, media_folder, write_stdout if is_printed else lambda text: None)

    def _request(self, number: int, is_streamed: bool) -> "Request":
        """Return the request for a response. Its random numbers depend only on the seed."""
        from omnizoo.generation.chat_model import Request
        from omnizoo.modalities.sampling import Sampling

        settings = self.settings
        generator = self.model.seeded(settings.seed)
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, generator)
        prompt = self.prompts[number].prompt
        if not is_streamed:
            return Request(prompt, sampling)
        self._print_title(number)
        return Request(prompt, sampling, self.terminals[number].show)

    def _print_title(self, number: int) -> None:
        """Print the first characters of a prompt as a title, if there are several prompts."""
        if not self.is_single:
            line = " ".join(self.prompts[number].text.split())
            ellipsis = "..." if len(line) > MAX_PROMPT_LENGTH else ""
            self.terminals[number].write(f"--- {line[:MAX_PROMPT_LENGTH]}{ellipsis}".translate(CONTROL) + "\n")

    def _end(self, number: int, outcome: "Outcome", is_streamed: bool) -> dict[str, Any]:
        """Finish a response: print it unless it was streamed, write its record to the JSONL file, and return it."""
        terminal = self.terminals[number]
        if isinstance(outcome, UserError):
            raise UserError(f"{self._name(number)} cannot be used: {outcome}" if not self.is_single else str(outcome))
        if not is_streamed:
            self._print_title(number)
            for piece in outcome:
                terminal.show(piece)
        terminal.end()
        prompt = self.prompts[number]
        record: dict[str, Any] = {"prompt": prompt.text, "answer": self.model.text(outcome)}
        if prompt.expected is not None:
            record["expected"] = prompt.expected
        record["items"] = terminal.files
        if self.file is not None:
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.file.flush()
        return record


def write_stdout(text: str) -> None:
    """Print text without a line break, and flush it so that it appears at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


class Terminal:
    """Prints one response during generation: new characters of its text, and the file names of its media items."""

    def __init__(self, model: "ChatModel", media_folder: Path, write: Callable[[str], None] = write_stdout) -> None:
        """Create a printer.

        Args:
            model: The model. It decodes text and saves media.
            media_folder: Folder for generated media.
            write: Function that prints text.
        """
        self.write = write
        self.model = model
        self.media_folder = media_folder
        self.piece: GeneratedPiece | None = None
        self.text = ""  # the part of the current piece that is already printed
        self.count = 0  # number of pieces shown
        self.files: list[str] = []

    def show(self, piece: "GeneratedPiece") -> None:
        """Print the new characters of a piece of text, or save a media item and print its file name."""
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
        """Print the rest of the current piece and a line break."""
        if self.piece is None:
            return
        if self.piece.modality == "text":
            self._print(self.model.decode(self.piece))
        self.write("\n")
        self.piece = None

    def _print(self, text: str) -> None:
        """Print the characters of `text` that were not printed before."""
        new_text = text[len(self.text) :]
        self.write(new_text.translate(CONTROL))
        self.text = text


def read_messages(path: Path) -> list[dict[str, Any]]:
    """Read the rows in the file of `--messages`.

    A JSON file contains one row, and a JSONL file one row per line. A row is a list of messages, or an object with
    `messages`.

    Raises:
        UserError: If the file cannot be read, is empty or has other contents.
    """
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
