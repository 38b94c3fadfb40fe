"""No framework: OmniZoo's composed model (a language model, two towers, two projectors) in a bare loop.

    [torchrun] composed.py ASSETS omni [--steps 20]

No other trainer of the benchmark takes such a model. Rows are padded to the longest of the step, pictures go through
their tower together, sounds as well, each as long as the longest may be.
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
from assets import EARS, EYES, PAD, RATE
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
SHUFFLED, JOINED, HOP = 2, 4, 160  # patches along each side that become one place; positions of a sound that do
LONGEST = EARS["max_source_positions"] * 2 * HOP  # samples


def projector(given: int, made: int) -> nn.Module:
    return nn.Sequential(nn.Linear(given, made), nn.GELU(), nn.Linear(made, made))


class Composed(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.language = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa")
        eyes = {key: value for key, value in EYES.items() if key != "model_type"}
        ears = {key: value for key, value in EARS.items() if key != "model_type"}
        self.eyes = SiglipVisionModel(SiglipVisionConfig(**eyes, vision_use_head=False))
        self.ears = WhisperEncoder(WhisperConfig(**ears))
        width = self.language.config.hidden_size
        self.from_eyes = projector(EYES["hidden_size"] * SHUFFLED**2, width)
        self.from_ears = projector(EARS["d_model"] * JOINED, width)

    def forward(self, batch: dict[str, Any], marks: dict[str, int]) -> torch.Tensor:
        ids = batch["ids"]
        embedded = self.language.get_input_embeddings()(ids)
        patches = self.eyes(batch["pictures"]).last_hidden_state
        side = EYES["image_size"] // EYES["patch_size"] // SHUFFLED
        grid = patches.unflatten(1, (side, SHUFFLED, side, SHUFFLED)).transpose(2, 3)
        seen = self.from_eyes(grid.flatten(3, 5).flatten(1, 2))
        embedded = embedded.masked_scatter((ids == marks["image"])[..., None], seen.flatten(0, 1))
        heard = self.ears(batch["sounds"]).last_hidden_state
        heard = self.from_ears(heard.flatten(1).unflatten(1, (-1, EARS["d_model"] * JOINED)))
        kept = torch.cat([clip[:places] for clip, places in zip(heard, batch["places"], strict=True)])
        embedded = embedded.masked_scatter((ids == marks["audio"])[..., None], kept)
        logits = self.language(inputs_embeds=embedded, attention_mask=(ids != PAD).long()).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORE)


class Rows:
    """Batches of rows, read and collated in the loop."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(folder)
        seconds = LONGEST // RATE
        self.mel = WhisperFeatureExtractor(EARS["num_mel_bins"], RATE, HOP, chunk_length=seconds, n_fft=400)
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.rows = [json.loads(line) for line in (folder / "chat.jsonl").read_text().splitlines()]
        random.Random(0).shuffle(self.rows)
        self.rows, self.at = self.rows[rank::world], 0

    def next(self) -> dict[str, Any]:
        rows = [self.rows[(self.at + i) % len(self.rows)] for i in range(ROWS)]
        self.at += ROWS
        pictures = [self.picture(name) for row in rows for name in row.get("images", [])]
        waves = [soundfile.read(self.folder / name)[0] for row in rows for name in row.get("audios", [])]
        places = [-(-len(wave) // (2 * HOP * JOINED)) for wave in waves]
        left = iter(places)
        if not pictures:  # a blank one, which nobody sees: every rank runs every part
            pictures = [torch.zeros(3, EYES["image_size"], EYES["image_size"])]
        if not waves:
            waves, places = [np.zeros(RATE)], [0]
        ids, labels = [], []
        for row in rows:
            seen = (EYES["image_size"] // EYES["patch_size"] // SHUFFLED) ** 2
            asked = row["messages"][0]["content"]
            asked = asked.replace("<image>", f"<|image_begin|>{'<|image_pad|>' * seen}<|image_end|>")
            if "<audio>" in asked:
                asked = asked.replace("<audio>", f"<|audio_begin|>{'<|audio_pad|>' * next(left)}<|audio_end|>")
            given = self.tokenizer(f"<|im_start|> user {asked} <|im_end|> <|im_start|> assistant")["input_ids"]
            answer = self.tokenizer(f"{row['messages'][1]['content']} <|im_end|>")["input_ids"]
            ids.append(torch.tensor(given + answer))
            labels.append(torch.tensor([IGNORE] * len(given) + answer))
        sounds = self.mel(waves, sampling_rate=RATE, return_tensors="pt").input_features
        return {
            "ids": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD),
            "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE),
            "pictures": torch.stack(pictures),
            "sounds": sounds,
            "places": places,
        }

    def picture(self, name: str) -> torch.Tensor:
        side = EYES["image_size"]
        values = np.asarray(Image.open(self.folder / name).resize((side, side)), np.float32)
        return torch.from_numpy(values / 127.5 - 1).permute(2, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("assets", type=Path)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=20)
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
