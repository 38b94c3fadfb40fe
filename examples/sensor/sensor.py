"""A modality of one's own, in and out: time series. Everything a user writes to train on it is in this file."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from omnizoo import BadMedia, CustomFlops, Decoder, Encoder, Inputs, Media, MediaSize, Sampling


class Series:
    """What reading and writing a series have in common: `patch` values are one place in the sequence."""

    patch: int

    def measure(self, media: Media) -> MediaSize:
        values = media.value
        if not isinstance(values, list | np.ndarray) or len(values) == 0 or len(values) % self.patch:
            raise BadMedia(f"a series is a list of numbers, as many as a multiple of {self.patch}")
        places = len(values) // self.patch
        return MediaSize(places, cost=float(places))

    def prepare(self, media: Media) -> Inputs:
        values = torch.as_tensor(np.asarray(media.value, np.float32))
        if not values.isfinite().all():
            raise BadMedia("a series with values that are not finite")
        return {"values": values.view(-1, self.patch)}

    def dummy_input(self) -> Inputs:
        return {"values": torch.zeros(1, self.patch)}


class SeriesEncoder(Series, Encoder):
    def __init__(self, width: int, patch: int = 8, hidden: int = 64) -> None:
        super().__init__()
        self.patch = patch
        self.net = nn.Sequential(nn.Linear(patch, hidden), nn.GELU(), nn.Linear(hidden, width))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        features: torch.Tensor = self.net(torch.cat([item["values"] for item in items]))
        return features


class SeriesDecoder(Series, CustomFlops, Decoder):
    """Predicts the next `patch` values at a time, `horizon` in all, as their mean (squared error)."""

    def __init__(self, width: int, patch: int = 8, horizon: int = 16) -> None:
        super().__init__()
        self.patch, self.horizon = patch, horizon
        self.enter, self.head = nn.Linear(patch, width), nn.Linear(width, patch)

    def modules_run_by(self, method: Literal["embed", "loss"]) -> list[nn.Module]:
        return [self.enter if method == "embed" else self.head]

    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        return torch.cat([item["values"] for item in items])

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.enter(targets)
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(hidden), targets, reduction="none").mean(-1).sum()

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        return None if len(targets) * self.patch >= self.horizon else self.head(hidden)

    def render(self, targets: torch.Tensor) -> Any:
        return targets.flatten().float().cpu().numpy()

    def save(self, item: Any, stem: str) -> str:
        np.savetxt(f"{stem}.csv", item, fmt="%.6g")
        return f"{stem}.csv"
