"""Frechet distance (FID) between generated and expected images, on the features of a pretrained model."""

from collections.abc import Sequence
from typing import Any

import torch

from omnizoo.config.errors import UserError
from omnizoo.modalities.metrics.features import FrozenTower


class FrechetDistance:
    """The Frechet distance between Gaussians that are fitted to the features of generated and of expected images.

    With Inception v3 features, this distance is called FID. Estimates from few images are biased upwards, so compare
    only values with the same number of images.

    Args:
        path: Folder of a vision model, such as DINOv2, or a CLIP model.
    """

    def __init__(self, path: str) -> None:
        self.tower = FrozenTower(path, "fid")

    def score_all(self, answers: Sequence[Any]) -> float | None:
        """Return the distance over all responses; None if there are fewer than two images on one side."""
        generated = self._features([file for answer in answers for file in answer.files])
        expected = self._features([file for answer in answers for file in answer.expected_files])
        if min(len(generated), len(expected)) < 2:
            return None
        distance = frechet_distance(generated, expected)
        if not distance < float("inf"):
            raise UserError(f"fid: the distance is {distance}. The features of {self.tower.path} are not finite.")
        return distance

    def _features(self, files: Sequence[Any]) -> torch.Tensor:
        """Return the features `[images and frames, width]` of files, in float64."""
        images = [self.tower.image_features(file) for file in files if file.suffix in (".png", ".jpg", ".webp", ".mp4")]
        return torch.cat(images).double() if images else torch.empty(0, 1)


def frechet_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the Frechet distance between Gaussians that are fitted to two sets of features `[count, width]`.

    It is |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)). The last trace is the sum of the singular values of S1^T S2,
    where S are square roots of the covariances: the centered features themselves.
    """
    centered = [(features - features.mean(0)) / (len(features) - 1) ** 0.5 for features in (first, second)]
    cross_trace = torch.linalg.svdvals(centered[0] @ centered[1].T).sum()
    squares = sum(part.square().sum() for part in centered)
    return float((first.mean(0) - second.mean(0)).square().sum() + squares - 2 * cross_trace)
