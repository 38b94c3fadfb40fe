"""A loop without a framework for OmniZoo's composed model: a language model, two towers and two projectors.

    [torchrun] composed.py ASSETS omni [--steps 20]

No other contestant supports such a model. Rows are padded to the longest of the step. Images pass through their tower
as one batch, and so do audio clips, which are padded to the maximum length.
"""

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torch.distributed as dist
import torch.nn.functional as F
from assets import AUDIO, PAD, RATE, VISION
from PIL import Image
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
    WhisperFeatureExtractor,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

IGNORE, ROWS = -100, 4
SHUFFLED, JOINED = 2, 4  # patches per side, and audio positions, that become one placeholder token
HOP = 160  # audio samples per frame
LONGEST = AUDIO["max_source_positions"] * 2 * HOP  # maximum length of audio, in samples


def projector(in_features: int, out_features: int) -> nn.Module:
    """Build a two-layer projector."""
    return nn.Sequential(nn.Linear(in_features, out_features), nn.GELU(), nn.Linear(out_features, out_features))


class Composed(nn.Module):
    """The composed model; `forward` returns the mean cross entropy."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.language = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa")
        vision = {key: value for key, value in VISION.items() if key != "model_type"}
        audio = {key: value for key, value in AUDIO.items() if key != "model_type"}
        self.vision = SiglipVisionModel(SiglipVisionConfig(**vision, vision_use_head=False))
        self.audio = WhisperEncoder(WhisperConfig(**audio))
        width = self.language.config.hidden_size
        self.vision_projector = projector(VISION["hidden_size"] * SHUFFLED**2, width)
        self.audio_projector = projector(AUDIO["d_model"] * JOINED, width)

    def forward(self, batch: dict[str, Any], marks: dict[str, int]) -> torch.Tensor:
        ids = batch["ids"]
        embedded = self.language.get_input_embeddings()(ids)
        patches = self.vision(batch["images"]).last_hidden_state
        side = VISION["image_size"] // VISION["patch_size"] // SHUFFLED
        grid = patches.unflatten(1, (side, SHUFFLED, side, SHUFFLED)).transpose(2, 3)
        image_features = self.vision_projector(grid.flatten(3, 5).flatten(1, 2))
        embedded = embedded.masked_scatter((ids == marks["image"])[..., None], image_features.flatten(0, 1))
        audio_states = self.audio(batch["audio"]).last_hidden_state
        audio_features = self.audio_projector(audio_states.flatten(1).unflatten(1, (-1, AUDIO["d_model"] * JOINED)))
        counts = batch["audio_tokens"]
        audio_features = torch.cat([clip[:count] for clip, count in zip(audio_features, counts, strict=True)])
        embedded = embedded.masked_scatter((ids == marks["audio"])[..., None], audio_features)
        logits = self.language(inputs_embeds=embedded, attention_mask=(ids != PAD).long()).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORE)


class Rows:
    """Reads rows and collates them to batches, in the training loop."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(folder)
        seconds = LONGEST // RATE
        self.mel = WhisperFeatureExtractor(AUDIO["num_mel_bins"], RATE, HOP, chunk_length=seconds, n_fft=400)
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.rows = [json.loads(line) for line in (folder / "chat.jsonl").read_text().splitlines()]
        random.Random(0).shuffle(self.rows)
        self.rows, self.at = self.rows[rank::world], 0

    def next(self) -> dict[str, Any]:
        rows = [self.rows[(self.at + i) % len(self.rows)] for i in range(ROWS)]
        self.at += ROWS
        images = [self.read_image(name) for row in rows for name in row.get("images", [])]
        waves = [soundfile.read(self.folder / name)[0] for row in rows for name in row.get("audios", [])]
        audio_tokens = [-(-len(wave) // (2 * HOP * JOINED)) for wave in waves]
        remaining_counts = iter(audio_tokens)
        if not images:  # a dummy image, whose features are not used: every rank runs every tower
            images = [torch.zeros(3, VISION["image_size"], VISION["image_size"])]
        if not waves:
            waves, audio_tokens = [np.zeros(RATE)], [0]
        ids, labels = [], []
        for row in rows:
            image_tokens = (VISION["image_size"] // VISION["patch_size"] // SHUFFLED) ** 2
            prompt = row["messages"][0]["content"]
            prompt = prompt.replace("<image>", f"<|image_begin|>{'<|image_pad|>' * image_tokens}<|image_end|>")
            if "<audio>" in prompt:
                placeholders = "<|audio_pad|>" * next(remaining_counts)
                prompt = prompt.replace("<audio>", f"<|audio_begin|>{placeholders}<|audio_end|>")
            prompt_ids = self.tokenizer(f"<|im_start|> user {prompt} <|im_end|> <|im_start|> assistant")["input_ids"]
            response_ids = self.tokenizer(f"{row['messages'][1]['content']} <|im_end|>")["input_ids"]
            ids.append(torch.tensor(prompt_ids + response_ids))
            labels.append(torch.tensor([IGNORE] * len(prompt_ids) + response_ids))
        mel_features = self.mel(waves, sampling_rate=RATE, return_tensors="pt").input_features
        return {
            "ids": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD),
            "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE),
            "images": torch.stack(images),
            "audio": mel_features,
            "audio_tokens": audio_tokens,
        }

    def read_image(self, name: str) -> torch.Tensor:
        side = VISION["image_size"]
        values = np.asarray(Image.open(self.folder / name).resize((side, side)), np.float32)
        return torch.from_numpy(values / 127.5 - 1).permute(2, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("assets", type=Path, help="folder with models and data")
    parser.add_argument("model", help="name of the model")
    parser.add_argument("--steps", type=int, default=20, help="number of steps (default: 20)")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = Rows(args.assets / args.model)
    model = Composed(args.assets / args.model).train()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.language.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    marks = {name: rows.tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "audio")}
    for step in range(args.steps):
        loss = model(rows.next(), marks)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
