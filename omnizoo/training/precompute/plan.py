"""Plan what `omnizoo data precompute` writes: the stages, and one folder per source."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.fingerprint import content_of
from omnizoo.data.loading.reader import Reader
from omnizoo.data.sources.base import FolderRows, RowSource, RowView
from omnizoo.data.sources.precomputed import CODES, DIFFUSION
from omnizoo.models.diffusion.conditioning.latents import read_normalization
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.diffusion.samples import pipeline_of
from omnizoo.training.precompute.check import precomputed_rows
from omnizoo.training.precompute.codes_stage import CodesStage
from omnizoo.training.precompute.diffusion_stages import diffusion_stages
from omnizoo.training.precompute.run import Job
from omnizoo.training.precompute.shards import ShardFolder
from omnizoo.training.precompute.stages import RowItems, Stage
from omnizoo.training.setup import build_bundle

STORED = "precomputed"  # in rows, the value of an item whose content is not needed any more


def plan_jobs(config: Config, out: Path, shard_rows: int) -> tuple[list[Stage], list[Job]]:
    """Return the stages for the model of a config, and one job for each of its sources.

    Args:
        config: The config of the run that will read the result.
        out: The folder to write.
        shard_rows: Number of rows per shard.

    Raises:
        UserError: If the config cannot be precomputed, or the folder has other content.
    """
    if config.preference_pairs != "refused" or config.single_answers:
        raise UserError("train.losses: rows with preferences cannot be precomputed. Train them without it.")
    config = config.changed(data={"text_dropout": 0.0})  # the empty prompt is encoded once
    bundle = build_bundle(config)
    reader = bundle.reader()
    for source in precomputed_rows(reader):
        raise UserError(f"data.sources: {source.content.folder} is precomputed already. Use its original source.")
    recipe = denoiser_recipe(bundle.model)
    if recipe is None:
        stages: list[Stage] = [CodesStage(reader.modalities, config.model)]
        common: dict[str, Any] = {"kind": CODES, "rules": {}, "normalization": None}
    else:
        folder = pipeline_of(config.model)
        stages = diffusion_stages(folder, config.data.text_tokens, recipe.trims_text)
        common = {
            "kind": DIFFUSION,
            "rules": {"pipeline": folder.class_name, **diffusion_rules(config)},
            "normalization": read_normalization(folder).to_json(),
        }
    return stages, [_job(reader, number, stages, common, out, shard_rows) for number in range(len(reader.sources))]


def diffusion_rules(config: Config) -> dict[str, Any]:
    """Return the settings that change the latents and encoded prompts of a row.

    Raises:
        UserError: If a setting makes items differ from epoch to epoch.
    """
    data = config.data
    if data.crop == "random":
        raise UserError("data.crop: random crops differ between epochs and cannot be precomputed. Use center.")
    return {"shapes": data.shapes, "frame_rate": data.frame_rate, "text_tokens": data.text_tokens}


def _job(
    reader: Reader, number: int, stages: Sequence[Stage], common: dict[str, Any], out: Path, shard_rows: int
) -> Job:
    """Return the job of a source, whose folder is created."""
    source = reader.sources[number]
    media_folder = media_folder_of(source) if common["kind"] == CODES else None
    plan = {
        **common,
        "shard_rows": shard_rows,
        "stages": [stage.name for stage in stages],
        "source": content_of(source),
        "fingerprints": {name: value for stage in stages for name, value in stage.fingerprints.items()},
        "media_folder": None if media_folder is None else str(media_folder),
    }
    folder = ShardFolder(
        path=out if len(reader.sources) == 1 else out / f"source-{number}",
        num_rows=len(source),
        shard_rows=shard_rows,
        stages=[stage.name for stage in stages],
        text_stages=[stage.name for stage in stages if stage.encodes_prompts],
        plan=plan,
    )
    folder.begin()
    describe = partial(describe_codes, source=source) if common["kind"] == CODES else describe_prompt
    return Job(reader, number, folder, describe)


def describe_prompt(row: RowItems, stage: Stage) -> dict[str, Any]:
    """Return the fields of a row of a diffusion transformer for `rows.jsonl`."""
    return {"fields": {"prompt": row.prompt}}


def describe_codes(row: RowItems, stage: Stage, source: RowSource) -> dict[str, Any]:
    """Return the fields of a row for `rows.jsonl`, and the size of each item whose targets are stored.

    Encoded media in the row are dropped if the targets of all items are stored. Otherwise, they are kept as base64.

    Raises:
        UserError: If the row has values that JSON cannot express.
    """
    items: dict[str, Any] = {}
    for index, item in enumerate(row.items):
        if stage.decodes(item):
            size = asdict(item.size) | {"cost": float(item.size.num_placeholders)}  # reading them costs no FLOPs
            items[str(index)] = {"port": list(item.port), "size": size}
    keeps_media = len(items) < len(row.items)
    fields = _without_bytes(row.fields, keeps_media)
    try:
        json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{source.where(row.row)}: the row cannot be written as JSON: {error}") from error
    return {"fields": fields, "items": items}


def _without_bytes(value: Any, keeps_media: bool) -> Any:
    """Return a value of a row with base64 instead of bytes, or with a fixed text if the bytes are not kept."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode() if keeps_media else STORED
    if isinstance(value, dict):
        return {key: _without_bytes(part, keeps_media) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_bytes(part, keeps_media) for part in value]
    return value


def media_folder_of(source: RowSource) -> Path | None:
    """Return the folder in which all rows of a source find their media; None if there is none."""
    while isinstance(source, RowView):
        folders = {media_folder_of(source.locate(int(first))[0]) for first in source.extents[:-1]}
        return folders.pop() if len(folders) == 1 else None
    return source.folder.base.resolve() if isinstance(source, FolderRows) else None
