"""Held-out rows, put to the model as questions at every evaluation: their answers, and metrics of them.

The weights of all ranks are brought together on the first one, which answers while the others wait; so this is for
models that fit on one device whole. Nothing of the run is touched: weights are copied, random numbers are its own.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnizoo.assembly.parts import held_bytes
from omnizoo.assembly.writer import Writer, whole_copy, writer_of
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.formats import Shape
from omnizoo.data.held_out import short_names
from omnizoo.data.reader import Reader
from omnizoo.data.rows import BadRow, RowSource
from omnizoo.modalities.base import Sampling
from omnizoo.modalities.item import BadMedia
from omnizoo.models.build import MASTER_DTYPE, is_own_module
from omnizoo.ops.device import is_host, total_memory
from omnizoo.parallel.agree import agree
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.answer_metrics import Answer, build_metrics, measure
from omnizoo.training.metrics import RunFolder

LOOKED_AT = 1000  # rows of a source, at most, to find some that ask


@dataclass(frozen=True)
class HeldOutRow:
    """A held-out row."""

    name: str  # of its source
    source: RowSource
    shape: Shape  # of its rows, as the config says
    row: int

    @property
    def where(self) -> str:
        return self.source.where(self.row)

    def find(self, name: str) -> Path | bytes:
        return self.source.find(self.row, name)


@dataclass(frozen=True)
class Sampled:
    """What became of the questions of one evaluation; on ranks other than the first, without records."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # of metrics, one line each
    records: list[dict[str, Any]] = field(default_factory=list)  # for samples.jsonl


class Sampler:
    """Asks the same questions at every evaluation."""

    def __init__(self, config: Config, model: nn.Module, mesh: Mesh, tokenizer: Any, reader: Reader) -> None:
        """`reader` is of the held-out data."""
        self.config, self.model, self.mesh, self.tokenizer = config, model, mesh, tokenizer
        self.metrics = build_metrics(config)
        self.questions = agree(mesh, lambda: choose_rows(reader, config.evaluation.samples) if mesh.is_first else [])
        self.count: int = mesh.from_first(len(self.questions))

    def take(self, step: int, run: RunFolder) -> Sampled:
        """All ranks must call."""
        mesh = self.mesh
        copy = whole_copy(self.model, self.config, mesh)
        writer = agree(mesh, lambda: None if copy is None else writer_of(copy, self.config.model, self.tokenizer))
        answers, records, answered = [], [], []
        for number in range(self.count):  # one after the other, so that no rank waits for long
            if writer is not None:
                answer, record = self._ask(writer, self.questions[number], run, run.items_of(step) / str(number))
                records.append({"step": step, "number": number, **record})
                if answer is not None:
                    answers.append(answer)
                    answered.append(records[-1])
            mesh.sum([0.0])
        measured = measure(self.metrics, answers)  # of none, on other ranks than the first
        for record, scores in zip(answered, measured.scores, strict=True):
            record |= {"metrics": scores} if scores else {}
        metrics, failures = mesh.from_first((measured.means, measured.failures))
        return Sampled(metrics, failures, records)

    def _ask(
        self, writer: Writer, asked: HeldOutRow, run: RunFolder, items: Path
    ) -> tuple[Answer | None, dict[str, Any]]:
        """Its answer, if there is one, and what is written down of it."""
        evaluation = self.config.evaluation
        record: dict[str, Any] = {"source": asked.name, "row": asked.where}
        generator = torch.Generator(writer.model.device).manual_seed(self.config.train.seed)
        sampling = Sampling(evaluation.temperature, generator=generator)
        try:
            row = asked.source.read(asked.row)
            question = writer.renderer.question(row, asked.find, asked.shape)
            record |= {"question": question.shown, "expected": question.expected}
            pieces = writer.answer(question.prompt, sampling, evaluation.max_tokens)
            files = [
                Path(writer.save(piece, items / str(i))) for i, piece in enumerate(pieces) if piece.modality != "text"
            ]
        except (BadRow, BadMedia, UserError, OSError) as error:
            return None, record | {"error": " ".join(str(error).split())}
        text = writer.text(pieces)
        kinds = [piece.modality for piece in pieces if piece.modality != "text"]
        named = [str(file.relative_to(run.root)) for file in files]
        made = [{"modality": kind, "file": file} for kind, file in zip(kinds, named, strict=True)]
        answer = Answer(question.shown, text, question.expected, files, row, asked.where)
        return answer, record | {"answer": text, "items": made}


def choose_rows(reader: Reader, count: int) -> list[HeldOutRow]:
    """The first rows that ask something, of all sources in turn."""
    reasons: list[str] = []

    def usable(number: int, name: str, source: RowSource) -> Iterator[HeldOutRow]:
        for row in range(min(len(source), LOOKED_AT + count)):
            asked = HeldOutRow(name, source, reader.renderer.shape(number), row)
            try:
                reader.renderer.question(source.read(row), asked.find, asked.shape)
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
    """Before `model` has weights: refuse metrics that cannot be, models that cannot be asked, and what would not fit: a
    whole copy besides what the first rank holds, or on a host all of its ranks."""
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
    itemsize = MASTER_DTYPE[config.parallel.precision].itemsize
    whole = sum(parameter.numel() for parameter in model.parameters()) * itemsize
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_host(mesh.device) else 1
    held, there = ranks * held_bytes(model, config) // mesh.layout.fsdp, total_memory(mesh.device)
    if whole + held > there:
        raise UserError(
            f"evaluation.samples: a whole copy of the model takes {whole / 2**30:,.1f} GiB on the first rank besides "
            f"the {held / 2**30:,.1f} GiB of training, and there are {there / 2**30:,.1f} GiB; set it to 0, and ask "
            "an export"
        )
