"""Drawings of colored shapes, their captions, and a judge that reads a drawing by comparing it with all shapes."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

SIZE = 16  # pixels per side
DETAIL = 8  # samples per pixel and side, for smooth edges
COLORS = {
    "red": (220, 50, 47),
    "green": (50, 160, 60),
    "blue": (40, 90, 220),
    "yellow": (240, 200, 40),
    "purple": (150, 60, 180),
    "black": (30, 30, 30),
}
SHAPES = ["circle", "square", "triangle", "cross"]
NEW_SHAPE = "ring"  # only LoRA training contains it
PLACES = {"top left": (4.75, 4.75), "top right": (11.25, 4.75), "bottom left": (4.75, 11.25)}
PLACES["bottom right"] = (11.25, 11.25)
SHIFT = 0.5  # maximum distance of a shape's center from its place, in pixels
RADIUS = (3.3, 4.2)  # minimum and maximum, in pixels
MAX_ERROR = 30.0  # root mean square over all values of a drawing, 0 to 255; a random shape has over 100

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Drawing:
    """The content of a drawing."""

    shape: str
    color: str
    place: str

    @property
    def caption(self) -> str:
        return f"a {self.color} {self.shape} {self.place}"


def captions(shapes: list[str]) -> list[Drawing]:
    """Return all drawings of the shapes, in all colors and places."""
    return [Drawing(*values) for values in product(shapes, COLORS, PLACES)]


def coverage(shape: str, x: float, y: float, radius: float) -> Array:
    """Return the share of each pixel, [SIZE, SIZE], that a shape covers."""
    canvas = Image.new("L", (SIZE * DETAIL, SIZE * DETAIL))
    draw = ImageDraw.Draw(canvas)
    left, top, right, bottom = (DETAIL * value for value in (x - radius, y - radius, x + radius, y + radius))
    center = (DETAIL * x, DETAIL * y)
    arm = 0.35 * DETAIL * radius
    if shape == "square":
        draw.rectangle((left, top, right, bottom), fill=255)
    elif shape == "triangle":
        draw.polygon([(center[0], top), (right, bottom), (left, bottom)], fill=255)
    elif shape == "cross":
        draw.rectangle((left, center[1] - arm, right, center[1] + arm), fill=255)
        draw.rectangle((center[0] - arm, top, center[0] + arm, bottom), fill=255)
    else:
        draw.ellipse((left, top, right, bottom), fill=255)
        if shape == NEW_SHAPE:
            hole = [center[0] - 1.4 * arm, center[1] - 1.4 * arm, center[0] + 1.4 * arm, center[1] + 1.4 * arm]
            draw.ellipse(hole, fill=0)
    return np.asarray(canvas.resize((SIZE, SIZE), Image.Resampling.BOX), np.float32) / 255


def paint(drawing: Drawing, rng: np.random.Generator) -> Image.Image:
    """Paint a drawing on white, with a random size and a small random shift."""
    x, y = np.array(PLACES[drawing.place]) + rng.uniform(-SHIFT, SHIFT, 2)
    covered = coverage(drawing.shape, x, y, rng.uniform(*RADIUS))[..., None]
    pixels = 255 * (1 - covered) + np.array(COLORS[drawing.color]) * covered
    return Image.fromarray(np.rint(pixels).astype(np.uint8))


class Judge:
    """Reads drawings: the shape, color and place, out of all, with the smallest squared error.

    The error is minimized over a grid of sizes and shifts. A drawing that resembles none of them has no reading.
    """

    def __init__(self) -> None:
        shifts = np.linspace(-1.5 * SHIFT, 1.5 * SHIFT, 5)
        radii = np.linspace(RADIUS[0] - 0.3, RADIUS[1] + 0.3, 5)
        self.templates = []
        templates = []
        for shape, (place, center) in product([*SHAPES, NEW_SHAPE], PLACES.items()):
            for dx, dy, radius in product(shifts, shifts, radii):
                self.templates.append((shape, place))
                templates.append(coverage(shape, center[0] + dx, center[1] + dy, radius).ravel())
        self.coverage = np.stack(templates)  # [templates, pixels]

    def read(self, image: Image.Image) -> Drawing | None:
        """Return the content of a drawing; None if it is not a clear drawing of any shape."""
        darkness = 255 - np.asarray(image.convert("RGB"), np.float32).reshape(-1, 3)  # [pixels, 3]
        errors = []
        for color in COLORS.values():
            full = 255 - np.array(color, np.float32)
            # |darkness - coverage * full|^2 for all templates
            cross = self.coverage @ (darkness @ full)
            errors.append((darkness**2).sum() - 2 * cross + (self.coverage**2).sum(1) * (full @ full))
        table = np.stack(errors)  # [colors, templates]
        color, template = np.unravel_index(table.argmin(), table.shape)
        if np.sqrt(table.min() / darkness.size) > MAX_ERROR:
            return None
        shape, place = self.templates[template]
        return Drawing(shape, list(COLORS)[color], place)
