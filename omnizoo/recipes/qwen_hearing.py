"""What the talker of a published Qwen3 omni model hears of a conversation: the user's turns and the answer's text.
Which tokens these are, where each goes in the talker's own sequence, and the positions there: the loader knows it all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from omnizoo.modalities.base import Follower, Ids, Inputs, Item
from omnizoo.modalities.item import BadMedia
from omnizoo.recipes.qwen_towers import shapes_of

HEADER = 3  # tokens before an answer's text: begin, role, line break
PREFIX = 9  # places between the user's turns and the first frame
PAD, BOS, EOS = -1, -2, -3  # in the place of a row: embeddings that mean so


@dataclass(frozen=True)
class Heard:
    """What of a conversation the talker gets to see."""

    spans: list[tuple[int, int]]  # the user's turns, then the answer with its header
    ids: Ids  # of the user's turns
    items: list[Item]  # of the user's turns
    answer: int  # tokens of the answer with its header


class Hearing(Follower):
    config: Any  # of the whole model
    settings: Any  # of its talker

    @property
    def talker(self) -> Any:
        raise NotImplementedError

    def hear(self, ids: Ids, items: Sequence[Item], answer: int, answers: int | None, what: str) -> Heard:
        """`answers`: how many there should be; None: any number."""
        starts = np.flatnonzero(ids == self.config.im_start_token_id)
        ends = [*starts[1:].tolist(), len(ids)]
        roles = [int(ids[start + 1]) if start + 1 < len(ids) else -1 for start in starts]
        turns = list(zip(starts.tolist(), ends, roles, strict=True))
        said = [(start, end) for start, end, role in turns if role == self.config.assistant_token_id]
        if answers is not None and len(said) != answers:
            raise BadMedia(
                f"{what}: {answers} messages of the assistant are {len(said)} turns of it in what the chat template "
                "writes; speech needs a template that begins each as the published one does"
            )
        start, end = said[answer]
        stops = np.flatnonzero(ids[start + HEADER : end] == self.config.im_end_token_id)
        stop = start + HEADER + int(stops[0]) if len(stops) else end
        if stop <= start + HEADER:
            raise BadMedia(f"{what} is an answer without text: there is nothing to say aloud")
        asked = [(first, last - first) for first, last, role in turns if role == self.config.user_token_id]
        asked = [(first, count) for first, count in asked if first < start]
        if not asked:
            raise BadMedia(f"{what} is an answer to nothing: no message of the user is before it")
        within = [
            item
            for item in items
            if item.spans and any(first <= item.spans[0][0] < first + count for first, count in asked)
        ]
        if sounding := next((item for item in within if item.size.inside), None):
            raise BadMedia(
                f"{what} answers {sounding.media.name}, a clip with its own sound, which the model's talker does not "
                "hear so; leave the sound or the speech out"
            )
        tokens = np.concatenate([ids[first : first + count] for first, count in asked])
        return Heard([*asked, (start, stop - start)], tokens, within, stop - start)

    def notes(self, heard: Heard, frames: int) -> Inputs:
        """Which rows are media; and of each place of the talker's sequence the row that it gets, and its position."""
        asked = len(heard.ids)
        rows = asked + heard.answer
        text = np.arange(asked + HEADER, rows)
        trailing = np.full(frames, PAD)
        spoken = np.append(text[1:], EOS)[:frames]
        trailing[: len(spoken)] = spoken
        before = [*range(asked + HEADER), PAD, PAD, PAD, PAD, BOS, text[0]]
        is_media = np.isin(heard.ids, self.media_ids)
        positions = self.positions(heard, PREFIX + frames).double()
        return {
            "source": torch.from_numpy(np.concatenate([before, trailing])).long(),
            # As whole numbers: floats come in the precision of the computation.
            "positions": positions.contiguous().view(torch.int64),
            "text": torch.from_numpy(np.append(np.flatnonzero(~is_media), np.arange(asked, rows))),
            "media": torch.from_numpy(np.flatnonzero(is_media)),
        }

    @property
    def media_ids(self) -> list[int]:
        thinker = self.config.thinker_config
        return [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]

    def positions(self, heard: Heard, more: int) -> torch.Tensor:
        """`[3, L]`: as the talker itself counts, by the media in what it hears."""
        ids = torch.from_numpy(np.append(heard.ids, np.full(more, self.config.tts_pad_token_id))).long()[None]
        if not heard.items:
            return torch.arange(ids.shape[1]).expand(3, -1)
        about = self.media_shapes(heard.items)
        axes, _ = type(self.talker).get_rope_index(
            self.counting,
            ids,
            image_grid_thw=about["image_grid_thw"],
            video_grid_thw=about["video_grid_thw"],
            attention_mask=torch.ones_like(ids),
            audio_seqlens=about["audio_feature_lengths"],
            second_per_grids=about["video_second_per_grid"],
        )
        positions: torch.Tensor = axes[:, 0]
        return positions

    @property
    def counting(self) -> Any:
        """What the talker's own function for positions reads of it, and how long sound is: it asks its config for that
        where there are pictures besides, and published ones do not say it (transformers 5.22.2)."""
        asked = ("image", "video", "audio", "vision_start", "audio_start")
        ids = {f"{name}_token_id": getattr(self.settings, f"{name}_token_id") for name in asked}
        seconds = self.settings.position_id_per_seconds
        config = SimpleNamespace(
            **ids, position_id_per_seconds=seconds, audio_config=self.config.thinker_config.audio_config
        )
        return SimpleNamespace(
            config=config,
            spatial_merge_size=self.settings.spatial_merge_size,
            get_llm_pos_ids_for_vision=self.talker.get_llm_pos_ids_for_vision,
        )

    def media_shapes(self, items: Sequence[Item]) -> dict[str, torch.Tensor | None]:
        """By the names of the talker's own arguments."""
        sounds, clips = shapes_of(items, "audio"), shapes_of(items, "video")
        return {
            "image_grid_thw": shapes_of(items, "image"),
            "video_grid_thw": None if clips is None else clips[:, :3].long(),
            "audio_feature_lengths": None if sounds is None else sounds[:, 0],
            "video_second_per_grid": None if clips is None else clips[:, 3],
        }
