"""Generate responses to held-out prompts at every evaluation, and compute metrics on them.

The weights are gathered on rank 0. This rank generates while the other ranks wait. The full model must therefore fit on
one device. Generation does not change the run: it uses a copy of the weights and a separate random generator.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.held_out import short_names
from omnizoo.data.loading.reader import Reader
from omnizoo.data.rendering.prompt_renderer import PromptRenderer
from omnizoo.data.rendering.renderer import Question, Renderer
from omnizoo.data.rendering.thinking import Thinking
from omnizoo.data.row import BadRow, Row, SourceSchema
from omnizoo.data.sources.base import RowSource
from omnizoo.generation.chat_model import ChatModel, Request, chat_model_from
from omnizoo.generation.conversation import JointSupport
from omnizoo.generation.gathered_copy import whole_copy
from omnizoo.generation.generate import Outcome
from omnizoo.modalities.media import BadMedia
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.build import MASTER_DTYPE
from omnizoo.models.user_module import is_own_module
from omnizoo.ops.device import is_host, total_memory
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.rendezvous import ranks_on_node
from omnizoo.parallelize.memory import held_bytes
from omnizoo.reporting.plural import plural
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.training.evaluation.answer_metrics import Answer, build_metrics, measure
from omnizoo.training.evaluation.question_media import copy_media
from omnizoo.training.objective import Objective

SEARCHED_ROWS = 1000  # number of rows per source that are searched for prompts, in addition to evaluation.samples
GIB = 2**30


@dataclass(frozen=True)
class HeldOutRow:
    """A held-out row whose prompt the model responds to."""

    source_name: str  # short name of the source
    source: RowSource
    schema: SourceSchema  # schema of the source
    number: int  # number of the row in the source

    @property
    def where(self) -> str:
        """Name of the row, for messages."""
        return self.source.where(self.number)

    def find(self, name: str) -> Path | bytes:
        """Return the media file `name` of the row."""
        return self.source.find(self.number, name)


@dataclass(frozen=True)
class Sampled:
    """Responses of one evaluation, and metrics on them."""

    metrics: dict[str, float | None]
    failures: list[str]  # one message for each metric that failed
    records: list[dict[str, Any]]  # entries of samples.jsonl; empty on ranks other than 0

    def failed_prompts(self) -> str:
        """Return a message about the prompts without a response; empty if there are none. Only rank 0 has them."""
        failed = [record for record in self.records if "error" in record]
        if not failed:
            return ""
        return (
            f"{len(failed)} of {plural(len(self.records), 'prompt')} have no response. The first is "
            f"{failed[0]['row']}: {failed[0]['error']}"
        )


@dataclass(frozen=True)
class HeldOutPrompt:
    """A rendered prompt of a held-out row."""

    row: Mapping[str, Any]
    question: Question  # the prompt and the expected response
    record: dict[str, Any]  # the fields of the entry in samples.jsonl that are known before the response


class Sampler:
    """Generates responses to the same held-out prompts at every evaluation."""

    def __init__(self, objective: Objective, reader: Reader) -> None:
        """Choose the prompts. Collective: all ranks must call it. `reader` reads the held-out sources."""
        self.config = objective.config
        self.model = objective.model
        self.mesh = objective.mesh
        self.tokenizer = reader.text_renderer.tokenizer
        self.metrics = build_metrics(self.config)
        self.rows = sync_errors(self.mesh, lambda: choose_rows(reader) if self.mesh.is_first else [])
        self.num_rows: int = self.mesh.from_first(len(self.rows))  # `rows` is empty on ranks other than 0
        self.support = JointSupport()  # reused in every evaluation, so its warning is logged once per run
        self.question_media: dict[int, list[dict[str, str]]] = {}  # media of each prompt, in the run folder

    def respond(self, step: int, run: RunFolder) -> Sampled:
        """Generate the responses of one evaluation. Collective: all ranks must call it.

        Args:
            step: The step after which the model is evaluated.
            run: The run folder, where generated media and the media of the prompts are written.
        """
        mesh = self.mesh
        full_model = whole_copy(self.model, self.config, mesh)  # None on ranks other than 0

        def build() -> ChatModel | None:
            if full_model is None:
                return None
            thinking = Thinking.of(self.config.data)
            return chat_model_from(full_model, self.config.model, self.tokenizer, thinking, self.support)

        chat_model = sync_errors(mesh, build)

        answers: dict[int, Answer] = {}
        records: dict[int, dict[str, Any]] = {}
        finished = self._respond(chat_model, step, run) if chat_model is not None else iter(())
        for _ in range(self.num_rows):
            for number, answer, record in itertools.islice(finished, 1):
                records[number] = {"step": step, "number": number, **record}
                if answer is not None:
                    answers[number] = answer
            mesh.sum([0.0])  # a collective after each response keeps other ranks from timing out
        scored = [(answers[number], records[number]) for number in sorted(answers)]
        metrics, failures = mesh.from_first(measure(self.metrics, scored))  # only rank 0 has responses
        return Sampled(metrics, failures, [records[number] for number in sorted(records)])

    def _respond(
        self, chat_model: ChatModel, step: int, run: RunFolder
    ) -> Iterator[tuple[int, Answer | None, dict[str, Any]]]:
        """Yield the number of each prompt, its response (None if it failed) and its record.

        The prompts are yielded in the order in which their responses finish, and failed prompts last.
        """
        evaluation = self.config.evaluation
        requested: list[tuple[int, HeldOutPrompt]] = []  # (number, prompt) in the order of the requests
        failed: list[tuple[int, dict[str, Any]]] = []  # (number, record) of rows whose prompt cannot be used

        def requests() -> Iterator[Request]:
            for number, held_out in enumerate(self.rows):
                prompt = self._read(held_out, number, chat_model, run)
                if not isinstance(prompt, HeldOutPrompt):
                    failed.append((number, prompt))
                    continue
                requested.append((number, prompt))
                generator = chat_model.seeded(self.config.train.seed)
                yield Request(prompt.question.prompt, Sampling(evaluation.temperature, generator=generator))

        for index, outcome in chat_model.answers(requests(), evaluation.max_tokens, evaluation.batch):
            number, prompt = requested[index]
            answer, record = self._finish(prompt, outcome, chat_model, run, run.items_of(step) / str(number))
            yield number, answer, prompt.record | record
        for number, record in failed:
            yield number, None, record

    def _read(
        self, held_out: HeldOutRow, number: int, chat_model: ChatModel, run: RunFolder
    ) -> "HeldOutPrompt | dict[str, Any]":
        """Return the rendered prompt of a row, or a record with the reason why it cannot be used."""
        record: dict[str, Any] = {"source": held_out.source_name, "row": held_out.where}
        try:
            row = held_out.source.read(held_out.number)
            question = chat_model.renderer.question(row, held_out.find, held_out.schema)
        except (BadRow, BadMedia, UserError, OSError) as error:
            return record | {"error": " ".join(str(error).split())}
        record |= {"question": question.shown, "expected": question.expected}
        if number not in self.question_media:
            self.question_media[number] = copy_media(question.prompt.items, run, run.questions / str(number))
        if self.question_media[number]:
            record["question_items"] = self.question_media[number]
        return HeldOutPrompt(row, question, record)

    def _finish(
        self, prompt: HeldOutPrompt, outcome: Outcome, chat_model: ChatModel, run: RunFolder, media_folder: Path
    ) -> tuple[Answer | None, dict[str, Any]]:
        """Save the media of a response. Return the response (None if it failed) and the other fields of its record."""
        files = []
        media = []
        try:
            if isinstance(outcome, UserError):
                raise outcome
            for i, piece in enumerate(outcome):
                if piece.modality != "text":
                    file = Path(chat_model.save(piece, media_folder / str(i)))
                    files.append(file)
                    media.append({"modality": piece.modality, "file": str(file.relative_to(run.root))})
            has_expected_media = chat_model.has_same_media(outcome, prompt.question.expected_items)
        except (UserError, BadMedia, OSError) as error:
            return None, {"error": " ".join(str(error).split())}
        text = chat_model.text(outcome)
        answer = Answer(
            question=prompt.question.shown,
            text=text,
            expected=prompt.question.expected,
            files=files,
            row=prompt.row,
            where=prompt.record["row"],
            has_expected_media=has_expected_media,
        )
        return answer, {"answer": text, "items": media}


def check_prompt(renderer: Renderer | PromptRenderer, row: Row, held_out: HeldOutRow) -> None:
    """Raise an error if a row has no prompt."""
    if isinstance(renderer, PromptRenderer):
        renderer.prompt_of(row)
    else:
        renderer.question(row, held_out.find, held_out.schema)


def choose_rows(reader: Reader) -> list[HeldOutRow]:
    """Return the first `evaluation.samples` rows that have a prompt, taking one row from each source in turn.

    Raises:
        UserError: If no row has a prompt.
    """
    count = reader.config.evaluation.samples
    reasons: list[str] = []

    def rows_with_prompt(source_number: int, name: str, source: RowSource) -> Iterator[HeldOutRow]:
        for number in range(min(len(source), SEARCHED_ROWS + count)):
            held_out = HeldOutRow(name, source, reader.renderer.schema(source_number), number)
            try:
                check_prompt(reader.renderer, source.read(number), held_out)
            except (BadRow, BadMedia) as reason:
                reasons.append(f"{held_out.where}: {reason}")
                continue
            yield held_out

    names = short_names(reader.config.data.sources)
    rows_by_source = []
    for source_number, (name, source) in enumerate(zip(names, reader.sources, strict=True)):
        rows_by_source.append(rows_with_prompt(source_number, name, source))
    in_turn = (row for turn in itertools.zip_longest(*rows_by_source) for row in turn if row is not None)
    rows = list(itertools.islice(in_turn, count))
    if not rows:
        reason = f": {reasons[0]}" if reasons else ""
        raise UserError(
            f"evaluation.samples: {count}, but no row of data.eval_sources has a prompt{reason}. Set it to 0."
        )
    return rows


def check_samples(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Check the settings of metrics and responses before the weights of the model are loaded.

    A full copy of the model must fit on the device of rank 0, next to its training state. On CPU, it must fit next to
    the training state of all ranks of the node.

    Raises:
        UserError: If a metric is invalid, the model cannot generate, or a full copy of it does not fit.
    """
    build_metrics(config)
    if not config.evaluation.samples:
        return
    if is_own_module(config.model):
        raise UserError(
            f"evaluation.samples: {config.evaluation.samples}, but model.module has no KV cache, which generation "
            "needs. Set it to 0."
        )
    adapter = config.model.adapter
    if adapter is not None and adapter.base is not None:
        raise UserError(
            f"evaluation.samples: {config.evaluation.samples}, but the adapter cannot be merged into a base in "
            f"{adapter.base} (model.adapter.base). Set it to 0."
        )
    _check_copy_fits(model, mesh, config)


def _check_copy_fits(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Raise a `UserError` if a full copy of the model does not fit on the device of rank 0 (see `check_samples`)."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    copy_bytes = num_parameters * MASTER_DTYPE[config.train.precision].itemsize
    num_sharing = ranks_on_node() if is_host(mesh.device) else 1
    training_bytes = num_sharing * held_bytes(model, config) // mesh.layout.fsdp
    available = total_memory(mesh.device)
    if copy_bytes + training_bytes > available:
        raise UserError(
            f"evaluation.samples: a full copy of the model needs {copy_bytes / GIB:,.1f} GiB on rank 0, next to "
            f"{training_bytes / GIB:,.1f} GiB of training state, but the device has {available / GIB:,.1f} GiB. Set it "
            "to 0, and generate from an exported model."
        )
