"""Generate responses to held-out prompts at every evaluation, and compute metrics on them.

The weights are gathered on rank 0, which generates while the other ranks wait. The full model must therefore fit on one
device. Generation does not change the run: it uses a copy of the weights and a separate random generator.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.held_out import short_names
from omnizoo.data.loading.reader import Reader
from omnizoo.data.row import BadRow
from omnizoo.data.rows.schemas import SourceSchema
from omnizoo.data.sources.base import RowSource
from omnizoo.generation.chat_model import ChatModel, chat_model_from
from omnizoo.generation.gathered_copy import whole_copy
from omnizoo.modalities.media import BadMedia
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.build import MASTER_DTYPE
from omnizoo.models.user_module import is_own_module
from omnizoo.ops.device import is_host, total_memory
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallelize.memory import held_bytes
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.training.evaluation.answer_metrics import Answer, build_metrics, measure
from omnizoo.training.objective import LanguageObjective

LOOKED_AT = 1000  # rows of each source that are searched for prompts, in addition to evaluation.samples


@dataclass(frozen=True)
class HeldOutRow:
    """A held-out row whose prompt the model responds to."""

    name: str  # short name of the source
    source: RowSource
    schema: SourceSchema  # schema of the source
    row: int  # number of the row in the source

    @property
    def where(self) -> str:
        return self.source.where(self.row)

    def find(self, name: str) -> Path | bytes:
        return self.source.find(self.row, name)


@dataclass(frozen=True)
class Sampled:
    """Responses of one evaluation, and metrics on them."""

    metrics: dict[str, float | None]
    failures: list[str]  # one message for each metric that failed
    records: list[dict[str, Any]]  # entries of samples.jsonl; empty on ranks other than 0


class Sampler:
    """Generates responses to the same held-out prompts at every evaluation."""

    def __init__(self, objective: LanguageObjective, reader: Reader) -> None:
        """Choose the prompts. Collective: all ranks must call it. `reader` reads the held-out sources."""
        self.config, self.model, self.mesh = objective.config, objective.model, objective.mesh
        self.tokenizer = reader.renderer.tokenizer
        self.metrics = build_metrics(self.config)
        self.questions = sync_errors(self.mesh, lambda: choose_rows(reader) if self.mesh.is_first else [])
        self.count: int = self.mesh.from_first(len(self.questions))

    def take(self, step: int, run: RunFolder) -> Sampled:
        """Generate the responses of one evaluation. Collective: all ranks must call it.

        Args:
            step: The step after which the model is evaluated.
            run: The run folder, where generated media are written.
        """
        mesh = self.mesh
        copy = whole_copy(self.model, self.config, mesh)
        writer = sync_errors(
            mesh, lambda: None if copy is None else chat_model_from(copy, self.config.model, self.tokenizer)
        )
        answers, records = [], []
        for number in range(self.count):  # a collective after each response keeps other ranks from timing out
            if writer is not None:
                answer, record = self._ask(writer, self.questions[number], run, run.items_of(step) / str(number))
                records.append({"step": step, "number": number, **record})
                if answer is not None:
                    answers.append((answer, records[-1]))
            mesh.sum([0.0])
        metrics, failures = mesh.from_first(measure(self.metrics, answers))  # only rank 0 has responses
        return Sampled(metrics, failures, records)

    def _ask(
        self, writer: ChatModel, asked: HeldOutRow, run: RunFolder, items: Path
    ) -> tuple[Answer | None, dict[str, Any]]:
        """Return the response, None if it failed, and its record for samples.jsonl."""
        evaluation = self.config.evaluation
        record: dict[str, Any] = {"source": asked.name, "row": asked.where}
        generator = torch.Generator(writer.model.device).manual_seed(self.config.train.seed)
        sampling = Sampling(evaluation.temperature, generator=generator)
        try:
            row = asked.source.read(asked.row)
            question = writer.renderer.question(row, asked.find, asked.schema)
            record |= {"question": question.shown, "expected": question.expected}
            pieces = writer.answer(question.prompt, sampling, evaluation.max_tokens)
            files = {}
            for i, piece in enumerate(pieces):
                if piece.modality != "text":
                    files[Path(writer.save(piece, items / str(i)))] = piece.modality
        except (BadRow, BadMedia, UserError, OSError) as error:
            return None, record | {"error": " ".join(str(error).split())}
        text = writer.text(pieces)
        media = [{"modality": modality, "file": str(file.relative_to(run.root))} for file, modality in files.items()]
        answer = Answer(question.shown, text, question.expected, list(files), row, asked.where)
        return answer, record | {"answer": text, "items": media}


def choose_rows(reader: Reader) -> list[HeldOutRow]:
    """Return the first `evaluation.samples` rows that have a prompt, taken from all sources in turn.

    Raises:
        UserError: If no row has a prompt.
    """
    count = reader.config.evaluation.samples
    reasons: list[str] = []

    def usable(number: int, name: str, source: RowSource) -> Iterator[HeldOutRow]:
        for row in range(min(len(source), LOOKED_AT + count)):
            asked = HeldOutRow(name, source, reader.renderer.schema(number), row)
            try:
                reader.renderer.question(source.read(row), asked.find, asked.schema)
            except (BadRow, BadMedia) as reason:
                reasons.append(f"{asked.where}: {reason}")
                continue
            yield asked

    specs = reader.config.data.sources
    named = zip(short_names(specs), reader.sources, strict=True)
    lines = [usable(number, name, source) for number, (name, source) in enumerate(named)]
    in_turn = (asked for turn in itertools.zip_longest(*lines) for asked in turn if asked is not None)
    chosen = list(itertools.islice(in_turn, count))
    if not chosen:
        why = f"; {reasons[0]}" if reasons else ""
        raise UserError(f"evaluation.samples: no row of data.eval_sources can be put to the model as a question{why}")
    return chosen


def check_samples(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Check the settings of metrics and responses, before the model has weights.

    A full copy of the model must fit on the device of rank 0, next to its training state. On CPU, it must fit next to
    the training state of all ranks of the node.

    Raises:
        UserError: If a metric is invalid, the model cannot generate, or a full copy of it does not fit.
    """
    build_metrics(config)
    if not config.evaluation.samples:
        return
    if is_own_module(config.model):
        raise UserError("evaluation.samples: a module of your own is not asked: it has no cache; set it to 0")
    adapter = config.model.adapter
    if adapter is not None and adapter.base is not None:
        raise UserError(
            f"evaluation.samples: the base is held as {adapter.base} (model.adapter.base), and cannot be merged; set "
            "it to 0"
        )
    itemsize = MASTER_DTYPE[config.train.precision].itemsize
    whole = sum(parameter.numel() for parameter in model.parameters()) * itemsize
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_host(mesh.device) else 1
    held, there = ranks * held_bytes(model, config) // mesh.layout.fsdp, total_memory(mesh.device)
    if whole + held > there:
        raise UserError(
            f"evaluation.samples: a whole copy of the model takes {whole / 2**30:,.1f} GiB on the first rank besides "
            f"the {held / 2**30:,.1f} GiB of training, and there are {there / 2**30:,.1f} GiB; set it to 0, and ask "
            "an export"
        )
