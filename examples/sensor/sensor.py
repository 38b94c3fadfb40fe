"""A custom modality, in and out: time series. This file has all the code that the modality needs."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from omnizoo import BadMedia, CustomFlops, Decoder, Encoder, Inputs, Media, MediaSize, Sampling


class Series:
    """What encoder and decoder share: `patch` values of a series occupy one placeholder token."""

    patch: int

    def measure(self, media: Media) -> MediaSize:
        values = media.value
        if not isinstance(values, list | np.ndarray) or len(values) == 0 or len(values) % self.patch:
            raise BadMedia(f"a series is a list of numbers whose length is a multiple of {self.patch}")
        num_placeholders = len(values) // self.patch
        return MediaSize(num_placeholders, cost=float(num_placeholders))

    def prepare(self, media: Media) -> Inputs:
        values = torch.as_tensor(np.asarray(media.value, np.float32))
        if not values.isfinite().all():
            raise BadMedia("the series has values that are not finite")
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
    """Predicts the next `patch` values with mean squared error, until `horizon` values are generated."""

    def __init__(self, width: int, patch: int = 8, horizon: int = 16) -> None:
        super().__init__()
        self.patch = patch
        self.horizon = horizon
        self.enter = nn.Linear(patch, width)
        self.head = nn.Linear(width, patch)

    def modules_run_by(self, method: Literal["embed", "loss"]) -> list[nn.Module]:
        return [self.enter if method == "embed" else self.head]

    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        return torch.cat([item["values"] for item in items])

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.enter(targets)
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(hidden), targets, reduction="none").mean(-1)

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        return None if len(targets) * self.patch >= self.horizon else self.head(hidden)

    def render(self, targets: torch.Tensor) -> Any:
        return targets.flatten().float().cpu().numpy()

    def save(self, item: Any, stem: str) -> str:
        np.savetxt(f"{stem}.csv", item, fmt="%.6g")
        return f"{stem}.csv"
