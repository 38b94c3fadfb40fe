"""Draw the diagrams of the documentation as SVG files, in a light and a dark variant.

    python docs/draw_diagrams.py [FOLDER]     # default: docs/images

Each diagram is one function that draws on a `Canvas`. `tests/test_docs.py` checks that the files in docs/images are
those that this script writes.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

Color = Literal["gray", "blue", "green", "amber", "purple", "pink"]
Anchor = Literal["start", "middle", "end"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
SAMPLE_COLORS: tuple[Color, ...] = ("blue", "green", "amber", "purple", "pink")


@dataclass(frozen=True)
class Theme:
    """The colors of one variant."""

    name: str
    ink: str
    muted: str
    line: str
    fills: dict[Color, str]
    strokes: dict[Color, str]


LIGHT = Theme(
    name="light",
    ink="#1f2328",
    muted="#59636e",
    line="#818b98",
    fills={
        "gray": "#f6f8fa",
        "blue": "#ddf4ff",
        "green": "#dafbe1",
        "amber": "#fff3c4",
        "purple": "#f5ebff",
        "pink": "#ffeff7",
    },
    strokes={
        "gray": "#d1d9e0",
        "blue": "#54aeff",
        "green": "#4ac26b",
        "amber": "#d4a72c",
        "purple": "#c297ff",
        "pink": "#ff80c8",
    },
)
DARK = Theme(
    name="dark",
    ink="#e6edf3",
    muted="#9198a1",
    line="#7d8590",
    fills={
        "gray": "#161b22",
        "blue": "#0c2d4a",
        "green": "#12351f",
        "amber": "#3b2e0c",
        "purple": "#2d1f48",
        "pink": "#431b3a",
    },
    strokes={
        "gray": "#3d444d",
        "blue": "#388bfd",
        "green": "#3fb950",
        "amber": "#d29922",
        "purple": "#a371f7",
        "pink": "#db61a2",
    },
)


@dataclass
class Canvas:
    """An SVG picture of `width` x `height` pixels with a transparent background."""

    theme: Theme
    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        note: str = "",
        color: Color = "gray",
        dashed: bool = False,
        size: float = 14,
    ) -> None:
        """Draw a rounded rectangle with a title and, below it, a smaller note. Both may have several lines."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" '
            f'fill="{self.theme.fills[color]}" stroke="{self.theme.strokes[color]}" stroke-width="1.4"{dash}/>'
        )
        titles = text.split("\n") if text else []
        notes = note.split("\n") if note else []
        title_height, note_height = size * 1.25, (size - 2) * 1.3
        top = y + (height - len(titles) * title_height - len(notes) * note_height) / 2
        for i, line in enumerate(titles):
            self.text(x + width / 2, top + (i + 0.76) * title_height, line, size=size, bold=True)
        top += len(titles) * title_height
        for i, line in enumerate(notes):
            self.text(x + width / 2, top + (i + 0.76) * note_height, line, size=size - 2, muted=True)

    def frame(self, x: float, y: float, width: float, height: float, label: str, color: Color = "gray") -> None:
        """Draw a dashed frame with a label above its upper left corner."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" fill="none" '
            f'stroke="{self.theme.strokes[color]}" stroke-width="1.4" stroke-dasharray="6 4"/>'
        )
        self.text(x + 4, y - 7, label, size=13, muted=True, anchor="start")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        bold: bool = False,
        muted: bool = False,
        mono: bool = False,
        anchor: Anchor = "middle",
    ) -> None:
        """Write one line of text. `y` is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        family = f' font-family="{MONO}"' if mono else ""
        color = self.theme.muted if muted else self.theme.ink
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{color}"{weight}{family}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False, label: str = "") -> None:
        """Draw an arrow through `points`. The label is above the middle of the first segment."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.theme.line}" stroke-width="1.6"{dash} '
            f'marker-end="url(#tip)"/>'
        )
        if label:
            (x0, y0), (x1, y1) = points[:2]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 - 7, label, size=12, muted=True)

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Draw a thin line without a tip."""
        self.parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{self.theme.strokes["gray"]}"/>'
        )

    def svg(self) -> str:
        """Return the picture as SVG text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="{FONT}">'
        )
        marker = (
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0.8 L10,5 L0,9.2 z" fill="{self.theme.line}"/></marker></defs>'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", marker, *self.parts, "</svg>", ""])


def architecture(theme: Theme) -> Canvas:
    """Draw rows, data, balancing, the model and its recipe, and the results."""
    canvas = Canvas(theme, 980, 440, "From rows to a trained model")
    for i, modality in enumerate(("text", "image", "audio", "video", "your modality")):
        canvas.box(16, 40 + i * 44, 112, 34, modality, color=SAMPLE_COLORS[i], size=13)
    canvas.text(72, 26, "rows", muted=True)

    canvas.box(164, 96, 122, 88, "Data", "chat template,\npacking without\npadding", color="gray")
    canvas.box(318, 96, 132, 88, "Balancing", "packs and media\nto ranks, by cost", color="gray")
    canvas.arrow((130, 140), (162, 140))
    canvas.arrow((288, 140), (316, 140))
    canvas.arrow((452, 140), (484, 140))

    canvas.frame(476, 40, 330, 214, "model: unmodified Hugging Face code, or your module", color="blue")
    canvas.box(488, 100, 88, 80, "Encoders", "frozen or\ntrained", color="green", size=13)
    canvas.box(594, 100, 98, 80, "Foundation", "dense or\nmixture of\nexperts", color="blue", size=13)
    canvas.box(710, 100, 86, 80, "Decoders", "image, audio,\n...", color="pink", size=13)
    canvas.arrow((577, 140), (592, 140))
    canvas.arrow((693, 140), (708, 140))
    canvas.text(641, 222, "understands and generates", muted=True)

    canvas.box(842, 62, 122, 52, "Objective", "loss / global count", color="gray", size=13)
    canvas.box(842, 130, 122, 52, "Optimizer step", "one all-reduce", color="gray", size=13)
    canvas.box(842, 198, 122, 52, "Run folder", "checkpoint, report", color="gray", size=13)
    canvas.arrow((807, 140), (824, 140), (824, 88), (840, 88))
    canvas.arrow((903, 115), (903, 128))
    canvas.arrow((903, 183), (903, 196))

    canvas.box(476, 306, 158, 58, "Recipe", "facts about the family:\nblocks, experts, media", color="amber", size=13)
    canvas.box(648, 306, 158, 58, "Mesh", "FSDP2, HSDP, Ulysses,\nring, expert parallel", color="purple", size=13)
    canvas.arrow((555, 304), (555, 257))
    canvas.arrow((727, 304), (727, 257))
    canvas.text(641, 284, "parallelize", mono=True, size=12, muted=True)

    commands = ("new", "data inspect", "plan", "verify", "train", "eval", "generate", "export")
    canvas.text(16, 415, "omnizoo", mono=True, bold=True, anchor="start")
    x = 90.0
    for command in commands:
        width = 24 + 8.2 * len(command)
        canvas.box(x, 396, width, 30, color="gray")
        canvas.text(x + width / 2, 415, command, mono=True)
        x += width + 10
    return canvas


def mesh(theme: Theme) -> Canvas:
    """Draw the dense and the expert view of eight ranks."""
    canvas = Canvas(theme, 980, 400, "The dense view and the expert view of eight ranks")
    _ranks(
        canvas,
        left=16,
        title="dense view: dp_replicate 2 x dp_shard 2 x ulysses 2",
        colors=lambda rank: SAMPLE_COLORS[rank // 2],
        labels=lambda rank: f"pack {'ABCD'[rank // 2]}, half {rank % 2 + 1}",
        shards=lambda rank: f"weights {rank % 4 + 1}/4",
        pairs="ulysses: two ranks share the tokens of a pack",
    )
    _ranks(
        canvas,
        left=506,
        title="expert view: replicate 2 x ep_shard 2 x ep 2",
        colors=lambda rank: ("blue", "purple")[rank % 2],
        labels=lambda rank: ("experts 0 to 3", "experts 4 to 7")[rank % 2],
        shards=lambda rank: f"shard {rank // 2 % 2 + 1}/2",
        pairs="ep: tokens are sent to the rank of their expert",
    )
    notes = (
        "replicate: all-reduce of gradients (HSDP)",
        "shard, ep_shard: all-gather of weights, reduce-scatter of gradients (FSDP2)",
    )
    canvas.text(490, 372, "   ·   ".join(notes), muted=True)
    return canvas


def _ranks(
    canvas: Canvas,
    left: float,
    title: str,
    colors: Callable[[int], Color],
    labels: Callable[[int], str],
    shards: Callable[[int], str],
    pairs: str,
) -> None:
    """Draw eight ranks as two replicas of four."""
    canvas.text(left, 24, title, bold=True, size=14, anchor="start")
    for replica in range(2):
        top = 62 + replica * 140
        canvas.frame(left, top, 458, 104, f"replica {replica + 1}")
        for i in range(4):
            rank = replica * 4 + i
            x = left + 10 + i * 111
            note = f"{labels(rank)}\n{shards(rank)}"
            canvas.box(x, top + 12, 104, 80, f"rank {rank}", note, color=colors(rank), size=13.5)
    canvas.text(left + 229, 336, pairs, muted=True)


def row_path(theme: Theme) -> Canvas:
    """Draw the path of one row with an image, from its file to a checkpoint."""
    canvas = Canvas(theme, 980, 470, "The path of one row with an image")
    rows: tuple[tuple[str, tuple[tuple[str, str, Color], ...]], ...] = (
        (
            "data: loader workers",
            (
                ("sources", "a line of a file:\nRow", "gray"),
                ("rows", "messages, image\nsize from its header", "gray"),
                ("rendering", "tokens, targets,\nplaceholder tokens", "gray"),
                ("packing", "samples that fill\na pack", "gray"),
                ("loading", "image decoded:\nPack", "gray"),
            ),
        ),
        (
            "balancing: one step ahead",
            (
                ("pack_metadata", "ranks exchange\nlengths and costs", "amber"),
                ("step_plan", "packs and images\nassigned to ranks", "amber"),
                ("redistribute", "packs and images\nsent to ranks", "amber"),
                ("batch", "packs joined\nwithout padding", "amber"),
                ("prefetch", "ready before the\nstep begins", "amber"),
            ),
        ),
        (
            "training step: device",
            (
                ("local_batch", "tokens of this rank\non the device", "blue"),
                ("models/media", "encoder runs on the\nrank of the image", "green"),
                ("feature_exchange", "features sent to\ntheir tokens", "purple"),
                ("foundation", "attention within\neach sample", "blue"),
                ("objective", "loss terms /\nglobal counts", "blue"),
            ),
        ),
        (
            "update",
            (
                ("backward", "FSDP2 reduce-scatters\ngradients", "purple"),
                ("optimizer_step", "one all-reduce, clip,\nupdate", "blue"),
                ("recorder", "metrics.jsonl,\nprogress line", "gray"),
                ("checkpoint", "shards of all ranks,\nthen the manifest", "gray"),
            ),
        ),
    )
    for i, (label, boxes) in enumerate(rows):
        top = 30 + i * 112
        canvas.text(116 if i else 16, top - 8, label, bold=True, anchor="start")
        for j, (title, note, color) in enumerate(boxes):
            x = 16 + j * 194
            canvas.box(x, top, 172, 70, title, note, color=color, size=13.5)
            if j:
                canvas.arrow((x - 21, top + 35), (x - 2, top + 35))
        if i:
            canvas.arrow((878, top - 41), (878, top - 27), (102, top - 27), (102, top - 2))
    return canvas


def packing(theme: Theme) -> Canvas:
    """Draw samples, packs, and which tokens attend to which."""
    canvas = Canvas(theme, 980, 330, "Packing: samples of different lengths fill packs without padding")
    lengths = (5, 9, 3, 7, 4, 8, 6, 6)
    unit, height = 17.0, 22.0
    canvas.text(16, 24, "samples", bold=True, anchor="start")
    for i, length in enumerate(lengths):
        _sample(canvas, 16, 38 + i * 31, length * unit, height, i)
    canvas.arrow((196, 160), (246, 160), label="best fit")

    canvas.text(270, 24, "packs of 16 tokens (data.pack_tokens)", bold=True, anchor="start")
    packs = ((1, 3), (5, 0, 2), (6, 7, 4))
    for row, numbers in enumerate(packs):
        x = 270.0
        for number in numbers:
            _sample(canvas, x, 60 + row * 62, lengths[number] * unit, height + 6, number)
            x += lengths[number] * unit
        canvas.text(270, 54 + row * 62, f"pack {row}", size=12, muted=True, anchor="start")
    canvas.text(270, 262, "A step has train.packs_per_step packs,", muted=True, anchor="start")
    canvas.text(270, 282, "on any number of ranks.", muted=True, anchor="start")

    left, top, cell = 650.0, 44.0, 15.0
    canvas.text(left, 24, "attention in pack 1", bold=True, anchor="start")
    start = 0
    for number in packs[1]:
        for query in range(lengths[number]):
            x, y = left + start * cell, top + (start + query) * cell
            width = (query + 1) * cell
            fill = theme.fills[_sample_color(number)]
            stroke = theme.strokes[_sample_color(number)]
            canvas.parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{cell:g}" fill="{fill}" stroke="{stroke}" '
                f'stroke-width="0.8"/>'
            )
        start += lengths[number]
    size = 16 * cell
    canvas.parts.append(
        f'<rect x="{left:g}" y="{top:g}" width="{size:g}" height="{size:g}" fill="none" '
        f'stroke="{theme.strokes["gray"]}"/>'
    )
    canvas.text(left + size / 2, top + size + 18, "tokens attend only within their sample", size=12, muted=True)
    return canvas


def _sample_color(number: int) -> Color:
    """Return a color that differs within each pack of the picture."""
    return SAMPLE_COLORS[(number + number // 5) % 5]


def _sample(canvas: Canvas, x: float, y: float, width: float, height: float, number: int) -> None:
    """Draw one sample as a bar with its number."""
    canvas.box(x, y, width - 1.5, height, str(number), color=_sample_color(number), size=12)


def sequence_parallel(theme: Theme) -> Canvas:
    """Draw Ulysses and ring attention on two ranks."""
    canvas = Canvas(theme, 980, 400, "Ulysses and ring attention on two ranks")
    canvas.text(16, 24, "Ulysses: ranks exchange tokens for heads", bold=True, size=14, anchor="start")
    for rank in range(2):
        top = 52 + rank * 150
        canvas.text(16, top - 6, f"rank {rank}", size=12, muted=True, anchor="start")
        _heads(canvas, 16, top, tokens=range(rank * 4, rank * 4 + 4), heads=range(4))
        _heads(canvas, 196, top, tokens=range(8), heads=range(rank * 2, rank * 2 + 2))
        canvas.arrow((128, top + 46), (192, top + 46))
        canvas.arrow((400, top + 46), (464, top + 46))
        canvas.text(298, top + 82, "attention kernel", size=12, muted=True)
    canvas.text(160, 190, "all-to-all", size=12, muted=True)
    canvas.text(432, 190, "all-to-all", size=12, muted=True)
    canvas.text(16, 336, "half of the tokens, all heads", size=12, muted=True, anchor="start")
    canvas.text(310, 336, "all tokens, half of the heads", size=12, muted=True)
    canvas.text(16, 372, "Bytes per rank fall with the number of ranks.", muted=True, anchor="start")
    canvas.text(16, 391, "Heads limit the number of ranks.", muted=True, anchor="start")

    canvas.line(496, 16, 496, 392)
    left = 520
    canvas.text(left, 24, "Ring: keys and values go around", bold=True, size=14, anchor="start")
    for rank in range(2):
        top = 66 + rank * 150
        canvas.text(left, top - 8, f"rank {rank}", size=12, muted=True, anchor="start")
        canvas.box(left, top, 118, 70, "queries", f"of tokens {rank * 4} to {rank * 4 + 3}", color="blue", size=13)
        canvas.box(left + 168, top, 118, 70, "keys, values", "its own tokens", color="green", size=13)
        canvas.box(left + 316, top, 128, 70, "keys, values", "of the other rank", color="green", dashed=True, size=13)
        canvas.arrow((left + 166, top + 35), (left + 121, top + 35))
        canvas.text(left + 194, top + 90, "round 1", size=12, muted=True)
        canvas.text(left + 418, top + 90, "round 2", size=12, muted=True)
    canvas.arrow((left + 226, 138), (left + 226, 190), (left + 372, 190), (left + 372, 214))
    canvas.arrow((left + 240, 214), (left + 240, 178), (left + 386, 178), (left + 386, 138))
    canvas.text(left, 336, "Blocks are merged by their log-sum-exp.", size=12, muted=True, anchor="start")
    canvas.text(left, 372, "Any number of ranks; the transfer runs during the computation.", muted=True, anchor="start")
    canvas.text(left, 391, "Both mix: parallel.ulysses x parallel.ring.", muted=True, anchor="start")
    return canvas


def _heads(canvas: Canvas, x: float, y: float, tokens: range, heads: range) -> None:
    """Draw a grid of heads (rows) and tokens (columns), colored by head."""
    for i, head in enumerate(heads):
        for j in range(len(tokens)):
            color = SAMPLE_COLORS[head]
            fill, stroke = canvas.theme.fills[color], canvas.theme.strokes[color]
            canvas.parts.append(
                f'<rect x="{x + j * 25:g}" y="{y + i * 23:g}" width="23" height="21" rx="3" fill="{fill}" '
                f'stroke="{stroke}"/>'
            )


def expert_dispatch(theme: Theme) -> Canvas:
    """Draw the dispatch of tokens to experts on two ranks."""
    canvas = Canvas(theme, 980, 330, "Expert parallelism on two ranks: dispatch, grouped matmul, combine")
    columns = (16, 180, 400, 590, 810)
    for rank in range(2):
        top = 52 + rank * 140
        first = rank * 4
        canvas.text(16, top - 8, f"rank {rank}", size=13, bold=True, anchor="start")
        canvas.box(columns[0], top, 130, 88, "router", "each token chooses\nits experts", color="gray")
        canvas.box(columns[1], top, 150, 88, "sort by expert", "(token, choice)\npairs", color="gray")
        canvas.box(
            columns[2],
            top,
            150,
            88,
            f"experts {first} to {first + 3}",
            "grouped matmul",
            color=("blue", "purple")[rank],
        )
        canvas.box(columns[3], top, 150, 88, "back in order", "by sender", color="gray")
        canvas.box(columns[4], top, 150, 88, "combine", "sum of the choices\nof each token", color="gray")
        canvas.arrow((148, top + 44), (178, top + 44))
        canvas.arrow((742, top + 44), (808, top + 44))
    for start, end in ((332, 398), (552, 588)):
        for source in range(2):
            for target in range(2):
                canvas.arrow((start, 96 + source * 140), (end, 96 + target * 140))
    canvas.text(365, 36, "all-to-all", size=12, muted=True)
    canvas.text(570, 36, "all-to-all", size=12, muted=True)
    canvas.text(
        16,
        316,
        "Each rank holds whole experts (parallel.ep); ep_shard shards them further. Routing weights enter before the "
        "second matmul.",
        muted=True,
        anchor="start",
    )
    return canvas


@dataclass(frozen=True)
class Bar:
    """Work on one lane of the timeline, from `start` to `end` in tenths of a step."""

    start: float
    end: float
    text: str
    color: Color


def step_timeline(theme: Theme) -> Canvas:
    """Draw what runs at the same time during a step."""
    canvas = Canvas(theme, 980, 300, "Timeline of one optimizer step")
    lanes: Sequence[tuple[str, Sequence[Bar]]] = (
        ("loader workers", (Bar(0, 10, "read, render, decode the packs of step s + 2", "gray"),)),
        (
            "prefetch thread",
            (
                Bar(0.3, 3.6, "metadata, assignment of step s + 1", "amber"),
                Bar(3.6, 6.4, "redistribute, pin memory", "amber"),
            ),
        ),
        (
            "compute",
            (
                Bar(0, 1.1, "encoders", "green"),
                Bar(1.5, 4.0, "forward", "blue"),
                Bar(4.0, 8.4, "loss, backward (recompute)", "blue"),
                Bar(9.2, 10, "update", "pink"),
            ),
        ),
        (
            "communication",
            (
                Bar(0.75, 1.55, "features", "purple"),
                Bar(1.6, 4.2, "all-gather, next block", "purple"),
                Bar(4.3, 8.35, "all-gather, reduce-scatter", "purple"),
                Bar(8.4, 9.3, "all-reduce", "purple"),
            ),
        ),
        ("host", (Bar(9.3, 10, "metrics", "gray"),)),
    )
    left, unit = 136.0, 82.0
    for i, (label, bars) in enumerate(lanes):
        top = 24 + i * 48
        canvas.text(left - 14, top + 21, label, anchor="end", bold=True)
        canvas.line(left, top + 40, left + 10 * unit, top + 40)
        for bar in bars:
            canvas.box(
                left + bar.start * unit, top, (bar.end - bar.start) * unit - 2, 32, bar.text, color=bar.color, size=11.5
            )
    canvas.arrow((left, 278), (left + 10 * unit, 278), label="one optimizer step s (one micro-batch shown)")
    return canvas


DIAGRAMS: dict[str, Callable[[Theme], Canvas]] = {
    "architecture": architecture,
    "mesh": mesh,
    "row_path": row_path,
    "packing": packing,
    "sequence_parallel": sequence_parallel,
    "expert_dispatch": expert_dispatch,
    "step_timeline": step_timeline,
}


def draw_all() -> dict[str, str]:
    """Return the SVG text of each file, by file name."""
    files = {}
    for name, draw in DIAGRAMS.items():
        for theme in (LIGHT, DARK):
            files[f"{name}_{theme.name}.svg"] = draw(theme).svg()
    return files


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0]) if arguments else Path(__file__).parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in draw_all().items():
        (folder / name).write_text(text)
    print(f"wrote {2 * len(DIAGRAMS)} files to {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
