"""Draw the captions of the drawing demo with plain diffusers, judge the drawings, and add them to the report.

    python examples/draw/examine.py runs/draw
    python examples/draw/examine.py runs/draw_ring --lora runs/draw_ring/lora

`--lora` loads a LoRA file into the exported pipeline of the demo, and also judges drawings of the shape that it adds.
"""

import argparse
import base64
import io
import json
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from make_data import split_captions
from PIL import Image
from rich.console import Console
from rich.table import Table
from shapes import NEW_SHAPE, SHAPES, SIZE, Drawing, Judge

from omnizoo import ReportSection, RunFolder, write_report

STEPS = 16
GOAL = 0.9  # share of drawings that the judge reads as their caption
DRAWINGS = 96  # of each set of captions
BATCH = 48
SHOWN = 24  # drawings of each set in the report


@dataclass(frozen=True)
class Result:
    caption: Drawing
    image: Image.Image
    is_right: bool


def draw(pipeline: DiffusionPipeline, captions: list[Drawing], judge: Judge) -> list[Result]:
    """Draw `DRAWINGS` captions, each one equally often, with a seed for each drawing."""
    repeated = (captions * -(-DRAWINGS // len(captions)))[:DRAWINGS]
    results = []
    for first in range(0, DRAWINGS, BATCH):
        batch = repeated[first : first + BATCH]
        images = pipeline(
            [drawing.caption for drawing in batch],
            height=SIZE,
            width=SIZE,
            num_inference_steps=STEPS,
            max_sequence_length=8,
            generator=[torch.Generator().manual_seed(first + i) for i in range(len(batch))],
        ).images
        results += [Result(d, image, judge.read(image) == d) for d, image in zip(batch, images, strict=True)]
    return results


def grid(results: list[Result]) -> str:
    """Return HTML with drawings; a red frame marks those that the judge reads differently."""
    cells = []
    for result in results[:SHOWN]:
        file = io.BytesIO()
        result.image.resize((64, 64), Image.Resampling.NEAREST).save(file, "PNG")
        source = base64.b64encode(file.getvalue()).decode()
        frame = "" if result.is_right else ";outline:2px solid #c33"
        cells.append(
            f'<figure style="display:inline-block;margin:4px;text-align:center;width:96px;vertical-align:top">'
            f'<img style="width:64px{frame}" src="data:image/png;base64,{source}" alt="">'
            f'<figcaption style="font-size:11px">{escape(result.caption.caption)}</figcaption></figure>'
        )
    return "".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", type=Path, default=Path("runs/draw/model"), help="exported pipeline")
    parser.add_argument("--lora", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(1)  # operations this small are slower on two threads
    pipeline = DiffusionPipeline.from_pretrained(args.model)
    pipeline.set_progress_bar_config(disable=True)
    training, held_out = split_captions(SHAPES)
    sets = {"captions of the training rows": training, "new captions": held_out}
    if args.lora is not None:
        pipeline.load_lora_weights(args.lora)
        ring_training, ring_held_out = split_captions([NEW_SHAPE])
        sets |= {f"captions with `{NEW_SHAPE}`": ring_training, f"new captions with `{NEW_SHAPE}`": ring_held_out}

    judge = Judge()
    console = Console()
    table = Table(title=f"Drawings that the judge reads as their caption (goal: {GOAL:.0%})", title_justify="left")
    for column in ("", "drawings", "right"):
        table.add_column(column, justify="right" if column else "left")
    shares = {}
    sections = []
    for name, captions in sets.items():
        results = draw(pipeline, captions, judge)
        shares[name] = sum(result.is_right for result in results) / len(results)
        table.add_row(name, str(len(results)), f"{shares[name]:.1%}")
        sections.append(ReportSection(f"Drawings of {name} (red frame: read differently)", grid(results)))
    console.print(table)
    (args.run / "examination.json").write_text(json.dumps(shares, indent=2) + "\n")
    console.print(f"report: {write_report(RunFolder(args.run), sections)}")
    missed = [name for name, share in shares.items() if share < GOAL]
    if missed:
        console.print(f"[bold red]goal missed:[/] {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
