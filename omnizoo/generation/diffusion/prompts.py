"""Generate media for prompts with a pipeline: `omnizoo generate` and `omnizoo.generate`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from omnizoo.config.errors import UserError, named_line
from omnizoo.generation.diffusion.pipeline import check_arguments, sample
from omnizoo.generation.diffusion.source import PipelineSource
from omnizoo.modalities.files.generated import modality_of_file, save_output
from omnizoo.modalities.files.image import read_image
from omnizoo.modalities.media import BadMedia, Media

PROMPT = "prompt"
KEY = "--pipeline"


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments in texts of the form `NAME=VALUE`, with values in YAML."""
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{KEY}: {text!r}; expected NAME=VALUE, such as num_inference_steps=20")
        try:
            arguments[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"{KEY}: the value of {name} is not valid YAML: {value!r}") from None
    return arguments


def generate_media(
    source: PipelineSource,
    rows: Sequence[str | Mapping[str, Any]],
    arguments: Mapping[str, Any],
    seed: int,
    out: Path,
    media_root: Path,
    device: torch.device,
    write: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Generate the media of each prompt, and write them to files.

    Args:
        source: The pipeline.
        rows: Prompts, as text or as rows with `prompt`, or with `messages` of one user message. Other fields of a row
            are arguments of the pipeline, such as `image`.
        arguments: Arguments for all prompts.
        seed: Seed of the noise of each prompt.
        out: Folder for the files.
        media_root: Folder to which the file names in rows are relative.
        device: Device of the pipeline.
        write: Prints a text.

    Yields:
        For each prompt, a record with `prompt`, `answer` (the kinds of media) and `items` (the files).

    Raises:
        UserError: If a prompt or an argument cannot be used.
    """
    check_arguments(source.folder, arguments, KEY)
    prompts = [_read(row, f"prompt {number + 1}", media_root) for number, row in enumerate(rows)]
    for prompt in prompts:
        check_arguments(source.folder, {name: value for name, value in prompt.items() if name != PROMPT}, "row")
    pipeline = source.load(device)
    for number, prompt in enumerate(prompts):
        try:
            output = sample(pipeline, prompt, arguments, seed)
        except (ValueError, TypeError) as error:  # the pipeline's check of its arguments
            raise UserError(f"{KEY}: {source.folder.class_name}: {named_line(error)}") from error
        files = save_output(output, out / str(number), arguments.get("frame_rate"))
        answer = "".join(f"[{modality_of_file(file)}: {file}]" for file in files)
        write(f"--- {prompt[PROMPT]}\n{answer}\n" if len(prompts) > 1 else f"{answer}\n")
        yield {"prompt": prompt[PROMPT], "answer": answer, "items": [str(file) for file in files]}


def _read(row: str | Mapping[str, Any], name: str, media_root: Path) -> dict[str, Any]:
    """Return the arguments in a row: its prompt, and images in place of file names."""
    if isinstance(row, str):
        return {PROMPT: row}
    fields = dict(row)
    if "messages" in fields:
        fields[PROMPT] = _text_of(fields.pop("messages"), name)
    if not isinstance(fields.get(PROMPT), str):
        raise UserError(f"{name}: `{PROMPT}` is missing; expected a text, a row with `{PROMPT}`, or a user message")
    for field, value in fields.items():
        if field != PROMPT and isinstance(value, str) and (media_root / value).is_file():
            try:
                fields[field] = read_image(Media(field, media_root / value, {}, 0))
            except BadMedia as reason:
                raise UserError(f"{name}: {reason}") from None
    return fields


def _text_of(messages: Any, name: str) -> str:
    """Return the text of the only user message."""
    users = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
    if len(users) != 1 or not isinstance(users[0].get("content"), str):
        raise UserError(f"{name}: expected one user message with a text, because a pipeline has no conversation")
    return str(users[0]["content"])
