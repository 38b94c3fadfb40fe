"""`omnizoo new modality NAME`: one file that trains as it is, and its test. What to change is said in comments."""

import keyword
from pathlib import Path

from omnizoo.config.errors import UserError

MODULE = '''"""{Name}: a modality of one's own, in and out. All of it is in this file; nothing of OmniZoo is edited.

In a config (the folder of this file must be on PYTHONPATH):

    model:
      foundation: {{path: MODEL_FOLDER}}
      modalities:
        {name}:
          encoder: {{kind: "{name}:{Name}Encoder"}}
          decoder: {{kind: "{name}:{Name}Decoder"}}     # leave it out if the model shall only read

In rows: {{"type": "{name}", "{name}": VALUE}} among the content of a message.
In the user's turn an item is read, in the assistant's turn it is produced. VALUE is what `Media.value` is below: a list
here; it may be a path, bytes, an array.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from omnizoo.modalities.base import Decoder, Encoder, Inputs, Sampling, Size
from omnizoo.modalities.item import BadMedia, Media

VALUES = 8  # numbers that make one place in the sequence: choose


class {Name}:
    """What reading and writing have in common."""

    def measure(self, media: Media) -> Size:
        """How many places an item takes, and what it costs: by a look at its header, without decoding it."""
        values = media.value
        if not isinstance(values, list | np.ndarray) or len(values) == 0 or len(values) % VALUES:
            raise BadMedia(f"{name} is a list of numbers, as many as a multiple of {{VALUES}}")
        places = len(values) // VALUES
        return Size(places, cost=float(places))  # choose: FLOPs; ranks share out items by it

    def prepare(self, media: Media) -> Inputs:
        """Decode: runs in a loader worker, without weights."""
        values = torch.as_tensor(np.asarray(media.value, np.float32))
        if not values.isfinite().all():
            raise BadMedia("{name} with values that are not finite")
        return {{"values": values.view(-1, VALUES)}}

    def blank(self) -> Inputs:
        """The smallest item: what a rank runs that has none."""
        return {{"values": torch.zeros(1, VALUES)}}


class {Name}Encoder({Name}, Encoder):
    """Options of the config (`encoder.options`) are arguments here."""

    def __init__(self, width: int, hidden: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(VALUES, hidden), nn.GELU(), nn.Linear(hidden, width))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """`[places of all items, width]`. What an item gives must not depend on the others."""
        features: torch.Tensor = self.net(torch.cat([item["values"] for item in items]))
        return features


class {Name}Decoder({Name}, Decoder):
    """Predicts the values of the next place; here as their mean (squared error), `places` times."""

    entering = ("enter",)

    def __init__(self, width: int, places: int = 2) -> None:
        super().__init__()
        self.most = places
        self.enter, self.head = nn.Linear(VALUES, width), nn.Linear(width, VALUES)

    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        return torch.cat([item["values"] for item in items])

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        """How targets are shown to the model again."""
        embedded: torch.Tensor = self.enter(targets)
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum over targets; OmniZoo divides by how many there are, over all ranks."""
        return F.mse_loss(self.head(hidden), targets, reduction="none").mean(-1).sum()

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        """The next target; None: the item ends."""
        return None if len(targets) >= self.most else self.head(hidden)

    def render(self, targets: torch.Tensor) -> Any:
        return targets.flatten().float().cpu().numpy()

    def save(self, item: Any, stem: str) -> str:
        np.savetxt(f"{{stem}}.csv", item, fmt="%.6g")
        return f"{{stem}}.csv"
'''

TEST = '''"""What OmniZoo takes for granted of {name}, checked. Run: pytest test_{name}.py

After that, with a config that has rows of it: omnizoo verify my.yaml --world 4
"""

import numpy as np
import pytest
import torch
from {name} import VALUES, {Name}Decoder, {Name}Encoder

from omnizoo.modalities.contract import check_decoder, check_encoder
from omnizoo.modalities.item import BadMedia, Media

WIDTH = 32


def items() -> list[Media]:
    """Of different sizes: choose real ones."""
    dice = np.random.default_rng(0)
    return [Media("{name}", dice.normal(size=n * VALUES).tolist(), {{}}) for n in (1, 3, 2)]


def test_the_encoder_keeps_its_contract() -> None:
    torch.manual_seed(0)
    check_encoder({Name}Encoder(WIDTH), items())


def test_the_decoder_keeps_its_contract() -> None:
    torch.manual_seed(0)
    check_decoder({Name}Decoder(WIDTH), items(), WIDTH)


def test_what_cannot_be_used_is_named() -> None:
    with pytest.raises(BadMedia):
        {Name}Encoder(WIDTH).measure(Media("{name}", [], {{}}))
'''


def new_modality(name: str, folder: Path) -> list[Path]:
    """Write `NAME.py` and `test_NAME.py` into `folder`, and say which files these are."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise UserError(f"new modality {name}: expected a name for a Python module, in small letters, such as thermal")
    fields = {"name": name, "Name": "".join(word.capitalize() for word in name.split("_"))}
    files = {folder / f"{name}.py": MODULE, folder / f"test_{name}.py": TEST}
    for path in files:
        if path.exists():
            raise UserError(f"new modality {name}: {path} exists already; it is left as it is")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text.format(**fields), encoding="utf-8")
    except OSError as error:
        raise UserError(f"new modality {name}: {error.filename} cannot be written: {error.strerror}") from None
    return list(files)
