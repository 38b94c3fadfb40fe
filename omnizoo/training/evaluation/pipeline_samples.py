"""Generate samples for held-out prompts at every evaluation of a diffusion transformer, with its family's own pipeline.

The weights are gathered on rank 0, which generates while the other ranks wait. Each prompt has a fixed seed, so samples
of different evaluations can be compared.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.reader import Reader
from omnizoo.data.rendering.prompt_renderer import PromptRenderer
from omnizoo.data.row import BadRow, Row
from omnizoo.generation.diffusion.pipeline import accepted_arguments, check_arguments, load_pipeline, sample
from omnizoo.generation.gathered_copy import whole_denoisers
from omnizoo.modalities.denoised import LATENTS, PixelShape
from omnizoo.modalities.files.generated import modality_of_file, save_output
from omnizoo.modalities.media import BadMedia
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.diffusion.samples import pipeline_of
from omnizoo.parallel.errors import sync_errors
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.training.evaluation.answer_metrics import Answer, build_metrics, measure
from omnizoo.training.evaluation.question_media import copy_media
from omnizoo.training.evaluation.responses import HeldOutRow, Sampled, choose_rows
from omnizoo.training.objective import Objective

KEY = "evaluation.pipeline"
TEXT_LENGTH = "max_sequence_length"


class PipelineSampler:
    """Generates samples for the same held-out prompts at every evaluation."""

    def __init__(self, objective: Objective, reader: Reader) -> None:
        """Choose the prompts. Collective: all ranks must call it. `reader` reads the held-out sources."""
        self.config = objective.config
        self.model = objective.model
        self.mesh = objective.mesh
        assert isinstance(reader.renderer, PromptRenderer), "rows of a diffusion transformer have prompts"
        self.renderer = reader.renderer
        self.folder = pipeline_of(self.config.model)
        self.arguments = sampling_arguments(self.config, self.folder)
        self.metrics = build_metrics(self.config)
        self.rows = sync_errors(self.mesh, lambda: choose_rows(reader) if self.mesh.is_first else [])
        self.num_rows: int = self.mesh.from_first(len(self.rows))  # `rows` is empty on ranks other than 0

    def respond(self, step: int, run: RunFolder) -> Sampled:
        """Generate the samples of one evaluation. Collective: all ranks must call it.

        Args:
            step: The step after which the model is evaluated.
            run: The run folder, where generated and expected media are written.
        """
        mesh = self.mesh
        denoisers = whole_denoisers(self.model, self.config, self.folder, mesh)  # None on ranks other than 0

        def load() -> Any:
            return None if denoisers is None else load_pipeline(self.folder, denoisers, mesh.device)

        pipeline = sync_errors(mesh, load)
        answers: list[tuple[Answer, dict[str, Any]]] = []
        records = []
        finished = self._sample_all(pipeline, step, run) if pipeline is not None else iter(())
        for number in range(self.num_rows):
            for answer, record in itertools.islice(finished, 1):
                records.append({"step": step, "number": number, **record})
                if answer is not None:
                    answers.append((answer, records[-1]))
            mesh.sum([0.0])  # a collective after each sample keeps other ranks from timing out
        metrics, failures = mesh.from_first(measure(self.metrics, answers))  # only rank 0 has samples
        return Sampled(metrics, failures, records)

    def _sample_all(self, pipeline: Any, step: int, run: RunFolder) -> Iterator[tuple[Answer | None, dict[str, Any]]]:
        """Yield the sample of each prompt (None if it failed) and its record."""
        for number, held_out in enumerate(self.rows):
            record: dict[str, Any] = {"source": held_out.source_name, "row": held_out.where}
            try:
                yield self._sample(pipeline, held_out, number, record, step, run), record
            except (BadRow, BadMedia, UserError, OSError, ValueError) as error:
                record["error"] = " ".join(str(error).split())
                yield None, record

    def _sample(
        self, pipeline: Any, held_out: HeldOutRow, number: int, record: dict[str, Any], step: int, run: RunFolder
    ) -> Answer:
        """Generate the sample of one prompt, save it next to the expected item, and complete its record."""
        row = held_out.source.read(held_out.number)
        prompt = self.renderer.prompt_of(row)
        record |= {"question": prompt, "expected": "", "answer": ""}
        expected = self._save_expected(held_out, row, number, run)
        if expected:
            record["expected_items"] = expected
        seed = self.config.train.seed + number
        output = sample(pipeline, {"prompt": prompt}, self.arguments, seed)
        files = save_output(output, run.items_of(step) / str(number), self.arguments.get("frame_rate"))
        record["items"] = [
            {"modality": modality_of_file(file), "file": str(file.relative_to(run.root))} for file in files
        ]
        return Answer(
            question=prompt,
            text="",
            expected=None,
            files=files,
            row=row,
            where=held_out.where,
            expected_files=[run.root / item["file"] for item in expected if "file" in item],
        )

    def _save_expected(self, held_out: HeldOutRow, row: Row, number: int, run: RunFolder) -> list[dict[str, str]]:
        """Copy the item of a row to the run folder, and return its description. Latents are not copied."""
        [rendered] = self.renderer.render_samples(row, (0, 0, held_out.number), held_out.find)
        items = [item for item in rendered.items if item.media.modality != LATENTS]
        return copy_media(items, run, run.questions / str(number))


def check_denoiser_settings(model: nn.Module, config: Config) -> None:
    """Check settings whose effect depends on whether the model is a diffusion transformer.

    Raises:
        UserError: If a setting has no effect on the model.
    """
    if denoiser_recipe(model) is None:
        if config.evaluation.pipeline:
            raise UserError(
                f"{KEY}: {config.evaluation.pipeline}, but the model is not a diffusion transformer. Remove it."
            )
        return
    for name in ("max_tokens", "temperature", "batch"):
        if name in config.evaluation.model_fields_set:
            raise UserError(f"evaluation.{name}: a diffusion transformer does not use it. Remove it, or see {KEY}.")
    for i, metric in enumerate(config.evaluation.metrics):
        if metric.kind in ("accuracy", "exact_match"):
            raise UserError(f"evaluation.metrics.{i}: {metric.kind} needs a language model. Use clip_score or fid.")
    if config.checkpoint.export is not None:
        raise UserError(
            "checkpoint.export: a diffusion transformer is not exported while it trains. Remove it, and run "
            "`omnizoo export` on a checkpoint."
        )
    if config.evaluation.samples or config.evaluation.pipeline:
        sampling_arguments(config, pipeline_of(config.model))


def sampling_arguments(config: Config, folder: PipelineFolder) -> dict[str, Any]:
    """Return the arguments of the pipeline: those of the config, and the shape and text length of the training data.

    Raises:
        UserError: If the pipeline has no such argument.
    """
    check_arguments(folder, config.evaluation.pipeline, KEY)
    arguments: dict[str, Any] = {}
    if config.data.shapes:
        shape = PixelShape.parse(config.data.shapes[0])
        arguments = {"height": shape.height, "width": shape.width, "num_frames": shape.frames}
    arguments[TEXT_LENGTH] = config.data.text_tokens
    accepted = accepted_arguments(folder)
    known = {name: value for name, value in arguments.items() if value is not None and name in accepted}
    return known | config.evaluation.pipeline
