"""The talker by Hugging Face's own modules, one conversation at a time, as the model's own `generate` wires it: what
tests compare with. And the tiny model and the rows of examples/published/qwen3_omni_talker.yaml."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
import yaml
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.modalities.base import Modality
from omnizoo.modalities.media import Media
from omnizoo.models.media.hf_model import media_model
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.objective import build_objective
from omnizoo.training.setup import build_bundle

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/published/qwen3_omni_talker.yaml"
OTHER_EXAMPLE = ROOT / "examples/published/qwen2_5_omni_talker.yaml"  # see spoken_2_5.py
DATA = ROOT / "examples/published/data"
KINDS = ("image", "video", "audio")
DTYPE = {"fp32": torch.float32, "fp64": torch.float64}
Tensors = dict[str, torch.Tensor]


def example(*overrides: str, file: Path = EXAMPLE) -> Config:
    """The config of the example with paths that hold anywhere."""
    fields = anywhere(file)["model"]
    paths = ["--model.tokenizer", fields["tokenizer"], "--model.modalities", json.dumps(fields["modalities"])]
    return load_config(file, [*paths, *overrides])


def anywhere(file: Path) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load(file.read_text())
    model = fields["model"]
    model["tokenizer"] = str(ROOT / model["tokenizer"])
    options = model["modalities"]["speech"]["decoder"]["options"]
    if "speakers" in options:
        options["speakers"] = str(ROOT / options["speakers"])
    return fields


def say(text: str, codes: Any, speaker: str) -> dict[str, Any]:
    speech = {"type": "speech", "codes": codes, "speaker": speaker}
    return {"role": "assistant", "content": [{"type": "text", "text": text}, speech]}


@cache
def rows() -> list[dict[str, Any]]:
    """Of the example, but for sounds of less than a second (of those the model itself makes something else in other
    company); and conversations of several turns, some of them spoken."""
    found = [json.loads(line) for line in (DATA / "said_aloud.jsonl").read_text().splitlines()]
    long = {file.name for file in DATA.glob("*.flac") if soundfile.info(file).duration > 1}
    found = [row for row in found if all(kind != "audio" or file in long for kind, file in media_of(row))]
    picture = [{"type": "image", "image": "image1.png"}, {"type": "text", "text": "And here?"}]
    long_answer = say("a very long answer to that.", [[i, 2 * i, 3, 63 - i] for i in range(20)], "ada")
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is there?"},
        say("red.", [[1, 2, 3, 4], [5, 6, 7, 8]], "ben"),
        {"role": "user", "content": picture},
        long_answer,
        {"role": "user", "content": "Thanks."},
        say("yes.", [[9, 9, 9, 9]], "ben"),
    ]
    silent = [*turns[:2], {"role": "assistant", "content": "no."}, *turns[3:5]]
    return [{"messages": turns}, {"messages": silent}] * 2 + found[:40]


def write_rows(folder: Path, some: Sequence[dict[str, Any]] | None = None) -> Path:
    path = folder / ("rows.jsonl" if some is None else "some.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows() if some is None else some)))
    return path


def whole_model(config: Config, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Hugging Face's own, with weights far enough from zero that every path matters."""
    fields = dict(config.model.config)
    built = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(built).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    if built.model_type == "qwen3_omni_moe":
        for part in (model.thinker.model.language_model, model.talker.model):
            part.set_experts_implementation("eager")  # grouped matmuls have no float64
        # Asked for where sound and pictures meet; published configs do not have it (transformers 5.22.2).
        model.config.talker_config.audio_config = model.config.thinker_config.audio_config
    return model.eval()


def media_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    """(kind, file) of its items, in order."""
    left = {kind: list(row.get(f"{kind}s", [])) for kind in KINDS}
    found = []
    for message in row["messages"]:
        content = message["content"]
        if isinstance(content, str):
            found += [(kind, left[kind].pop(0)) for kind in re.findall(r"<(image|video|audio)>", content)]
        else:
            found += [(part["type"], part[part["type"]]) for part in content if part["type"] in KINDS]
    return found


def model_inputs(ids: torch.Tensor, row: dict[str, Any], modalities: dict[str, Modality], dtype: Any) -> dict[str, Any]:
    """One conversation as Hugging Face's processors hand it to the model."""
    inputs: dict[str, Any] = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    prepared: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    seconds = []
    for kind, file in media_of(row):
        media = Media(kind, DATA / file, {})
        encoder = modalities[kind].encoder
        prepared[kind].append(encoder.prepare(media))
        if kind == "video":
            seconds.append(encoder.measure(media).shape[3])
    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grid) in names.items():
        if prepared[kind]:
            inputs[pixels] = torch.cat([item["pixels"] for item in prepared[kind]]).to(dtype)
            inputs[grid] = torch.stack([item["grid"] for item in prepared[kind]])
    if seconds:
        inputs["video_second_per_grid"] = torch.tensor(seconds)
    if prepared["audio"]:
        mels = [item["mels"].to(dtype) for item in prepared["audio"]]
        inputs["input_features"] = torch.nn.utils.rnn.pad_sequence(mels, batch_first=True).transpose(1, 2)
        lengths = torch.tensor([len(mel) for mel in mels])
        inputs["feature_attention_mask"] = (torch.arange(lengths.max()) < lengths[:, None]).long()
    return inputs


def spoken_answers(row: dict[str, Any]) -> list[tuple[int, torch.Tensor, str]]:
    """(which of the assistant's messages, its codes, its speaker) of those that are spoken."""
    found = []
    answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    for number, content in enumerate(answers):
        for part in content if isinstance(content, list) else ():
            if part["type"] == "speech":
                codes = np.load(DATA / part["codes"]) if isinstance(part["codes"], str) else part["codes"]
                found.append((number, torch.tensor(np.array(codes, np.int64)), part["speaker"]))
    return found


def speech_losses(
    model: Any, out: Any, inputs: dict[str, Any], number: int, codes: torch.Tensor, speaker: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the first codebook and over the others, of one of the assistant's messages in a conversation that the
    thinker has read (`out`, with its hidden states)."""
    config, talker = model.config, model.talker
    ids = inputs["input_ids"]
    starts = (ids[0] == config.im_start_token_id).nonzero().flatten().tolist()
    start = [at for at in starts if ids[0, at + 1] == config.assistant_token_id][number]
    end = start + int((ids[0, start:] == config.im_end_token_id).nonzero()[0])
    turn = torch.tensor([max(at for at in starts if at <= place) for place in range(start)])
    asked_by_user = ids[0, turn + 1] == config.user_token_id
    embed = out.hidden_states[0][:, :end]
    hidden = out.hidden_states[config.talker_config.accept_hidden_layer][:, :end]
    thinker = config.thinker_config
    is_media = sum(ids == id for id in (thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id)) > 0
    asked = model._get_talker_user_parts(0, start, is_media[:, :end], hidden, embed)[:, asked_by_user]
    marks = torch.tensor([[config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]])
    bos, eos, pad = talker.text_projection(model.thinker.get_input_embeddings()(marks)).chunk(3, 1)
    voice = config.talker_config.speaker_id[speaker]
    answer, answer_ids, trailing = model._get_talker_assistant_parts(start, end, voice, embed, pad, bos, eos)
    later = talker.code_predictor.get_input_embeddings()
    tables = [talker.get_input_embeddings(), *later]
    spoken = torch.stack([table(codes[:, i]) for i, table in enumerate(tables)], 1)  # [T, Q, H]
    frames = len(codes)
    text = torch.cat([trailing, pad.expand(1, frames, -1)], 1)[:, :frames]
    fed = torch.cat([asked, answer, spoken.sum(1)[None] + text], 1)
    asked_ids = ids[:, :start][:, asked_by_user]
    fed_ids = torch.cat([asked_ids, answer_ids, ids.new_full((1, frames), config.tts_pad_token_id)], 1)
    about = {
        name: inputs[name] for name in ("image_grid_thw", "video_grid_thw", "video_second_per_grid") if name in inputs
    }
    if "feature_attention_mask" in inputs:
        about["audio_feature_lengths"] = inputs["feature_attention_mask"].sum(1)
    said = talker(
        inputs_embeds=fed,
        attention_mask=torch.ones(fed.shape[:2], dtype=torch.long),
        talker_input_ids=fed_ids,
        use_cache=False,
        output_hidden_states=True,
        **about,
    )
    begin = fed.shape[1] - frames
    wanted = torch.cat([codes[:, 0], torch.tensor([config.talker_config.codec_eos_token_id])])
    first = F.cross_entropy(said.logits[0, begin - 1 :], wanted, reduction="sum")
    state = said.hidden_states[0][-1][0, begin - 1 : -1]
    residual = talker.code_predictor.model(
        inputs_embeds=torch.cat([state[:, None], spoken[:, :-1]], 1), use_cache=False
    )
    losses = [
        F.cross_entropy(head(residual.last_hidden_state[:, i + 1]), codes[:, i + 1], reduction="sum")
        for i, head in enumerate(talker.code_predictor.lm_head)
    ]
    return first, torch.stack(losses).sum()


def learning(precision: str, rows: Path, file: Path = EXAMPLE) -> Config:
    """The example for a step on `rows` whose losses have no weights."""
    sources = json.dumps([{"path": str(rows), "media_dir": str(DATA)}])
    losses = "[{kind: cross_entropy}]"
    step = ["--train.packs_per_step", "4", "--data.pack_tokens", "256", "--data.workers", "0", "--train.losses", losses]
    return example("--train.precision", precision, "--data.sources", sources, *step, file=file)


def learn_packed(config: Config, reference: PreTrainedModel) -> tuple[Any, Tensors, Tensors, dict[str, Modality]]:
    """One step of ours with the weights of `reference`: what was read, the sums of its losses, and all gradients."""

    def local(tensor: Any) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    with process_group() as process:
        mesh = build_mesh(config, process)
        assembled = build_bundle(config)
        model, loader = assembled.model, assembled.loader(mesh)
        parallelize_model(model, mesh, config)
        with torch.no_grad():
            tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            for name, tensor in (*reference.named_parameters(), *reference.named_buffers()):
                local(tensors[name]).copy_(tensor)
        objective = build_objective(model, mesh, config)
        data = next_step(loader, Balancer(model, mesh, config))
        found: Tensors = {}
        with keep_precision(config.train.precision):
            for batch in data.micro_batches:
                terms = {term.name: term.sum for term in objective.terms(batch)}
                sum(terms.values()).backward()
                found = {name: found.get(name, 0) + value.detach() for name, value in terms.items()}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
        return data, found, gradients, media_model(model).modalities(config.model)


def check_gradients(found: Tensors, reference: PreTrainedModel, error: float) -> None:
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert wanted.keys() == found.keys()
    # A bias of keys moves all logits of a query alike, which softmax does not see: its gradient is only rounding.
    scale = {name: wanted[re.sub(r"\bk(_proj)?\.bias", r"q\1.bias", name)].norm() for name in wanted}
    worst = {name: ((found[name] - value).norm() / scale[name]).item() for name, value in wanted.items()}
    assert max(worst.values()) <= error, max(worst, key=worst.__getitem__)


def write_config(
    folder: Path, file: Path = EXAMPLE, some: Sequence[dict[str, Any]] | None = None, **changes: dict[str, Any]
) -> Path:
    """The example with a small model of each kind, its sections changed key by key, as a file in `folder`."""
    fields = anywhere(file)
    fields["data"]["sources"] = [{"path": str(write_rows(folder, some)), "media_dir": str(DATA)}]
    fields["data"]["workers"] = 0
    fields["log"]["dir"] = str(folder / "run")
    for section, changed in changes.items():
        fields[section] = fields.get(section, {}) | changed
    path = folder / "spoken.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path
