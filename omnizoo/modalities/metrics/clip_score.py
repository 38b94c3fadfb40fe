"""CLIP score: how well generated images match their prompts (Hessel et al., 2021)."""

from typing import Any

from torch.nn.functional import cosine_similarity

from omnizoo.modalities.metrics.features import FrozenTower


class ClipScore:
    """100 times the cosine of the angle between the features of prompt and image, at least 0.

    The score of a clip is the mean over evenly spaced frames.

    Args:
        path: Folder of a CLIP or SigLIP model.
    """

    def __init__(self, path: str) -> None:
        self.tower = FrozenTower(path, "clip_score")

    def __call__(self, answer: Any) -> float | None:
        """Return the score of an `omnizoo.Answer`; None if it has no image."""
        files = [file for file in answer.files if file.suffix in (".png", ".mp4")]
        if not files:
            return None
        text = self.tower.text_features(answer.question)
        scores = []
        for file in files:
            scores.append(cosine_similarity(self.tower.image_features(file), text).clamp(min=0).mean())
        return 100 * float(sum(scores)) / len(scores)
