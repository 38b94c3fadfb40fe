"""An omni run small enough for tests: real pictures, sounds and clips on disk, a user's own modality, in and out."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from fixtures import TEXT
from PIL import Image
from tiny import SHAPE, write_config, write_rows

SENSOR = Path(__file__).parents[2] / "examples" / "sensor"  # on the path of whoever runs these configs

FOUNDATIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
LISTENING = {
    "model_type": "whisper",
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 20,
}
CODEC = {
    "model_type": "encodec",
    "sampling_rate": 2000,
    "upsampling_ratios": [5, 4],
    "num_filters": 4,
    "hidden_size": 16,
    "codebook_dim": 16,
    "codebook_size": 32,
    "num_lstm_layers": 1,
    "target_bandwidths": [1.0],
}
MODALITIES: dict[str, Any] = {
    "image": {
        "encoder": {"kind": "vision", "config": VISION},
        "projector": {"kind": "pixel_shuffle", "options": {"factor": 2}},
        "decoder": {"kind": "flow", "options": {"size": 8, "patch": 4, "hidden": 16, "layers": 1}},
    },
    "audio": {
        "encoder": {
            "kind": "audio",
            "config": LISTENING,
            "options": {"sample_rate": 2000, "hop_length": 50, "n_fft": 100},
        },
        "decoder": {"kind": "audio_codec", "config": CODEC, "weight": 0.5},
    },
    "video": {"encoder": {"kind": "video", "config": VISION, "options": {"fps": 2, "max_frames": 3, "times": True}}},
    "series": {
        "encoder": {"kind": "sensor:SeriesEncoder", "options": {"patch": 4, "hidden": 8}},
        "decoder": {"kind": "sensor:SeriesDecoder", "options": {"patch": 4}},
    },
}


def make_media(folder: Path, dice: random.Random, count: int = 6) -> dict[str, list[Any]]:
    """A few items of each modality; series are given by value."""
    rng = np.random.default_rng(dice.randrange(1 << 30))
    folder.mkdir(parents=True, exist_ok=True)
    media: dict[str, list[Any]] = {"image": [], "audio": [], "video": [], "series": []}
    for i in range(count):
        side = rng.integers(8, 40, 2)
        Image.fromarray(rng.integers(0, 255, (*side, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(rng.integers(300, 1500))), 2000)
        with av.open(str(folder / f"{i}.mp4"), "w") as clip:
            stream = clip.add_stream("mpeg4", rate=4)
            stream.width = stream.height = 16
            for _ in range(int(rng.integers(2, 8))):
                frame = av.VideoFrame.from_ndarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8), format="rgb24")
                clip.mux(stream.encode(frame))
            clip.mux(stream.encode())
        for modality, suffix in (("image", "png"), ("audio", "wav"), ("video", "mp4")):
            media[modality].append(f"media/{i}.{suffix}")
        media["series"].append(rng.normal(0, 1, 4 * int(rng.integers(1, 4))).round(3).tolist())
    return media


def make_rows(folder: Path, modalities: Sequence[str], count: int = 160, seed: int = 0) -> Path:
    """Conversations of which a third is text only; the others have up to three items, asked about or answered with."""
    dice, words = random.Random(seed), TEXT.split()
    media = make_media(folder / "media", dice)
    produced = [name for name in modalities if "decoder" in MODALITIES[name]]

    def text() -> dict[str, str]:
        return {"type": "text", "text": " ".join(dice.choices(words, k=dice.randint(1, 4)))}

    def item(names: list[str]) -> dict[str, Any]:
        name = dice.choice(names)
        return {"type": name, name: dice.choice(media[name])}

    rows = []
    for number in range(count):
        asked, answered = [text()], [text()]
        if number % 3:
            asked += [item(list(modalities)) for _ in range(dice.randint(0, 2))]
            answered += [item(produced) for _ in range(dice.randint(0, 1))]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        rows.append({"messages": messages})
    return write_rows(folder / "rows.jsonl", rows)


def write_omni_config(
    folder: Path,
    foundation: str = "qwen3_moe",
    modalities: Sequence[str] = tuple(MODALITIES),
    **sections: dict[str, Any],
) -> Path:
    """`folder`/tiny.yaml: a composed model of `foundation` and MODALITIES, on rows of all of them.

    With fewer modalities, a run starts in less time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_rows(folder, modalities)
    config = {"model_type": foundation} | SHAPE | FOUNDATIONS[foundation] | {"vocab_size": 544}
    parts = {name: MODALITIES[name] for name in modalities}
    model = {"config": None, "foundation": {"config": config}, "modalities": parts}
    data = {"sources": [{"path": str(rows)}], "pack_tokens": 160}
    train = {"packs_per_step": 8, "grad_clip": 0.5} | sections.pop("train", {})
    return write_config(
        folder, model=model | sections.pop("model", {}), data=data | sections.pop("data", {}), train=train, **sections
    )
