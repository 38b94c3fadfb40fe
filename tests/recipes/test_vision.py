"""Published vision models through our path (own encoders' calls, routed features, packs) against Hugging Face's own
forward and processors. Here in one process; `omnizoo verify` takes it from there to other layouts."""

import json
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from processes import train_on_ranks
from published import DTYPE, clip, gradients, loss_of, picture, sound
from safetensors.torch import load_file
from tensor_processors import published_canvases, published_tensors, published_video
from transformers import AutoModelForMultimodalLM
from vision import (
    FAMILIES,
    ROOT,
    SINGLE,
    TENSORS,
    example,
    forward_of,
    mix,
    ours,
    packed_inputs,
    publish,
    read,
    reference_inputs,
    spec_of,
    tiny_config,
    tiny_model,
    tokenizer,
    write,
)

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.modalities.files.pixels import resize
from omnizoo.modalities.media import BadMedia
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.media.batch import to_compute
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.recipe import read_facts, recipe_of
from omnizoo.ops.attention.bidirectional_spans import BidirectionalSpans
from omnizoo.ops.precision import keep_precision
from omnizoo.training.causality_probe import BIDIRECTIONAL, probe

CPU = torch.device("cpu")


# LLaVA takes features before the tower's last layer.
UNUSED = {"llava": ("model.vision_tower.encoder.layers.2.", "model.vision_tower.post_layernorm.")}
ERRORS = {"fp32": (1e-6, 1e-5), "fp64": (1e-11, 1e-10)}  # of the loss, of gradients


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_pack_losses_and_gradients_match_separate_samples(
    family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_error, gradient_error = ERRORS[precision]
    model, _ = ours(family, precision)
    reference = deepcopy(tiny_model(family, precision))
    contents = mix(family)
    if precision == "fp64" and family in SINGLE:
        contents = [each for each in contents if not any(getattr(part, "modality", "") == "audio" for part in each)]
        single = torch.Tensor.float  # which its code asks for in the midst of it
        monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))
    samples = [write(family, each) for each in contents]
    with keep_precision(precision):
        expected = torch.zeros((), dtype=DTYPE[precision])
        for sample in samples:
            out = forward_of(reference, reference_inputs(family, sample, DTYPE[precision]))
            expected = expected + loss_of(out.logits, sample.labels)
        logits = model(**packed_inputs(family, samples, model)).logits
        loss = loss_of(logits, torch.cat([sample.labels for sample in samples]))
    expected.backward()
    loss.backward()
    assert abs(loss - expected) <= loss_error * abs(expected)
    wanted, found = gradients(reference), gradients(model)
    assert wanted.keys() == {name for name, gradient in found.items() if name in wanted or gradient.any()}
    # A bias of keys moves all logits of a query alike, which softmax does not see: its gradient is only rounding.
    scale = {name: wanted[name.replace("k_proj.bias", "q_proj.bias")].norm() for name in wanted}
    worst = {name: ((found[name] - value).norm() / scale[name]).item() for name, value in wanted.items()}
    assert max(worst.values()) <= gradient_error, max(worst, key=worst.__getitem__)


@pytest.mark.parametrize("family", FAMILIES)
def test_image_features_do_not_depend_on_other_items(family: str) -> None:
    model, _ = ours(family, "fp64")
    pictures = [picture(40, 60), picture(300, 20, 1), picture(33, 33, 2)]
    encoder: Any = media_model(model).modalities(ModelSection(config={"model_type": family}))["image"].encoder
    items = [to_compute(encoder.prepare(item), CPU, torch.float64) for item in pictures]
    with torch.no_grad(), keep_precision("fp64"):
        alone = [encoder.encode([item]) for item in items]
        together = encoder.encode(items)
    assert [len(features) for features in alone] == [encoder.measure(item).num_placeholders for item in pictures]
    assert [encoder.count_placeholders(item) for item in items] == [len(features) for features in alone]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-11, atol=1e-11)
    blank = to_compute(encoder.dummy_input(), CPU, torch.float64)
    assert len(encoder.encode([blank])) == encoder.count_placeholders(blank) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_gradients_without_images_are_zero(family: str) -> None:
    model, _ = ours(family, "fp32" if family in SINGLE else "fp64")
    samples = [write(family, ["One plus one."]), write(family, ["Two."])]
    logits = model(**packed_inputs(family, samples, model)).logits
    loss_of(logits, torch.cat([sample.labels for sample in samples])).backward()
    found = gradients(model)
    unused = set(dict(model.named_parameters())) - found.keys()
    assert all(name.startswith(UNUSED.get(family, "-")) for name in unused)
    encoders = media_model(model).modules_of("encoder")
    towers = [name for encoder in encoders for name in (encoder.module, *encoder.projectors)]
    is_tower = tuple(f"{tower}." for tower in towers)
    assert all(bool(grad.any()) != name.startswith(is_tower) for name, grad in found.items() if "embed" not in name)


def test_image_tokens_attend_in_both_directions() -> None:
    model, _ = ours("gemma3", "fp64")
    inputs = packed_inputs("gemma3", [write("gemma3", each) for each in mix("gemma3")], model)
    with torch.no_grad():
        told, untold = model(**inputs).logits, model(**{k: v for k, v in inputs.items() if k != "mutual"}).logits
    assert (told - untold).norm() > 1e-3 * told.norm()


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_probe_accepts_bidirectional_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(family)
    probe(spec)
    monkeypatch.setattr(BidirectionalSpans, "affects", lambda *_: False)
    with pytest.raises(UserError, match="does not pass `mutual`"):
        probe(spec)
    monkeypatch.undo()
    stretches = [[(BIDIRECTIONAL[0], BIDIRECTIONAL[1] + 2)]]
    longer = lambda lengths, _, *how: BidirectionalSpans(lengths, stretches * len(lengths), *how)  # noqa: E731
    monkeypatch.setattr("omnizoo.training.causality_probe.BidirectionalSpans", longer)
    with pytest.raises(UserError, match="later tokens that are not bidirectional"):
        probe(spec)


# ---------------------------------------------------------------- what the published processors write and prepare


def published_text(family: str, media: Any, encoder: Any) -> str:
    """What stands for a picture, by the family's own processor."""
    value = media.value
    if family == "gemma3":
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        full = f"\n\n<start_of_image>{'<image_soft_token>' * encoder.tile_placeholders}<end_of_image>\n\n"
        crops = encoder.processor(images=value, return_tensors="np")["num_crops"]
        return Gemma3Processor.replace_image_token(SimpleNamespace(full_image_sequence=full), {"num_crops": crops}, 0)
    if family == "internvl":
        from transformers.models.internvl.processing_internvl import InternVLProcessor

        own = SimpleNamespace(start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>")
        own.image_seq_length = example(family)["config"]["image_seq_length"]
        counted = encoder.processor(images=value, return_tensors="np")["num_patches"]
        return InternVLProcessor.replace_image_token(own, {"num_patches": counted}, 0)
    if family.startswith("gemma4"):
        from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

        own = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
        is_raw = family in TENSORS
        out = published_tensors(family, [media]) if is_raw else encoder.processor(images=value, return_tensors="np")
        return Gemma4Processor.replace_image_token(own, out, 0)
    if family == "llava":
        from transformers.models.llava.processing_llava import LlavaProcessor

        own = SimpleNamespace(patch_size=8, num_additional_image_tokens=1, image_token="<image>")
        own.vision_feature_select_strategy = "default"
        return LlavaProcessor.replace_image_token(own, encoder.processor(images=value, return_tensors="np"), 0)
    if family == "llama4":
        from transformers.models.llama4.processing_llama4 import Llama4Processor

        own = SimpleNamespace(patch_size=8, downsample_ratio=4, _prompt_split_image=None)
        own._prompt_split_image = partial(Llama4Processor._prompt_split_image, own)
        return Llama4Processor.replace_image_token(own, published_tensors(family, [media]), 0)
    if family == "kimi_k25":  # marks around it are of the published chat template
        from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor

        own = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2), image_token="<|media_pad|>")
        places = Kimi_K25Processor.replace_image_token(own, published_tensors(family, [media]), 0)
        return f"<|media_begin|>image<|media_content|>{places}<|media_end|>"
    if family == "minicpmv4_7":
        from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

        own = SimpleNamespace(image_start_token="<image>", image_end_token="</image>", image_token="<|image_pad|>")
        own.slice_start_token, own.slice_end_token, own.slice_mode = "<slice>", "</slice>", True
        out = encoder.processor(images=value, return_tensors="pt")
        return MiniCPMV4_6Processor.replace_image_token(own, out, 0, image_token_divisor=16)
    # Mistral's processor cannot be imported without torchvision: rows end with a break, the last one with an end.
    height, width = encoder.processor(images=value, return_tensors="np")["image_sizes"][0]
    rows = ["[IMG]" * int(width // 16)] * int(height // 16)
    return "[IMG_BREAK]".join(rows) + "[IMG_END]"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(40, 60), (64, 64), (20, 120), (300, 33)])
def test_image_layout_matches_published_processor(family: str, shape: tuple[int, int]) -> None:
    modality, media = read(family)["image"], picture(*shape)
    size = modality.encoder.measure(media)
    runs = size.layout or (size.num_placeholders,)
    written = "".join(run if isinstance(run, str) else modality.placeholder * run for run in runs)
    assert modality.begin + written + modality.end == published_text(family, media, modality.encoder)
    assert sum(run for run in runs if isinstance(run, int)) == size.num_placeholders
    assert modality.encoder.count_placeholders(modality.encoder.prepare(media)) == size.num_placeholders


@pytest.mark.parametrize("family", TENSORS)
def test_pixels_match_transformers_tensor_processor(family: str) -> None:
    shapes = [(40, 60), (20, 120), (300, 33), (9, 9), (33, 33), (90, 50), (200, 300), (65, 31)]
    pictures = [picture(*shape, seed) for seed, shape in enumerate(shapes)]
    encoder: Any = read(family)["image"].encoder
    expected = published_tensors(family, pictures)
    prepared = [encoder.prepare(media) for media in pictures]
    if family == "gemma4_unified":  # which pads every picture to the most there may be
        is_place = (expected["image_position_ids"] >= 0).all(2)
        positions = torch.cat([item["positions"] for item in prepared])
        assert torch.equal(positions, expected["image_position_ids"][is_place])
        expected["pixel_values"] = expected["pixel_values"][is_place]
    if family == "kimi_k25":
        grids = [[1, *(item["positions"].amax(0) + 1).tolist()] for item in prepared]
        assert grids == expected["image_grid_thw"].tolist()
    pixels = torch.cat([item["pixels"] for item in prepared])
    torch.testing.assert_close(pixels, expected["pixel_values"], rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_gemma4_video_matches_published_processor(family: str, tmp_path: Path) -> None:
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    build, model = recipe_of(family).modalities, tiny_model(family, "fp32")
    for count, rate, frames, shape in ((3, 4.0, 9, (40, 64)), (7, 0.1, 7, (90, 30)), (None, 30.0, 61, (33, 33))):
        options = {"num_frames": count} if count else {"fps": 2.0}
        modality = build(model, None, {"video": options})["video"]
        encoder: Any = modality.encoder
        media = replace(clip(frames, *shape), options={"fps": rate})
        metadata = VideoMetadata(total_num_frames=frames, fps=rate)
        metadata.frames_indices = default_sample_indices_fn(metadata, count, None if count else 2.0)
        expected = published_video(family, [media.value[metadata.frames_indices]])
        own = SimpleNamespace(boi_token="<|image>", video_token="<|video|>", eoi_token="<image|>")
        size, inputs = encoder.measure(media), encoder.prepare(media)
        written = "".join(run if isinstance(run, str) else modality.placeholder * run for run in size.layout)
        told = {
            "num_soft_tokens_per_video": expected["num_soft_tokens_per_video"].tolist(),
            "video_metadata": [metadata],
        }
        assert written == Gemma4Processor.replace_video_token(own, told, 0)
        is_place = (expected["video_position_ids"] >= 0).all(2)
        assert torch.equal(inputs["positions"].flatten(0, 1), expected["video_position_ids"][is_place])
        assert torch.equal(inputs["pixels"].flatten(0, 1), expected["pixel_values_videos"][is_place])
        assert (
            size.num_placeholders
            == encoder.count_placeholders(inputs)
            == sum(encoder.count_placeholders(part) for _, part in encoder.split(size, inputs))
        )
    with pytest.raises(BadMedia, match=r"9 frames, .*requires 32"):
        build(model, None, {})["video"].encoder.measure(clip(9, 40, 64))
    with pytest.raises(UserError, match=r"model.modalities.video.encoder.options: max_soft_tokens is 71"):
        build(model, None, {"video": {"max_soft_tokens": 71}})
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"num_frames": None, "fps": []}))
    with pytest.raises(UserError, match=r"video_preprocessor_config.json: fps is \[\]"):
        build(model, str(tmp_path), {})


def test_llama4_canvas_matches_published_rule() -> None:
    encoder: Any = copy(read("llama4")["image"].encoder)
    encoder.edge, dice = 336, np.random.default_rng(0)
    for grows in (False, True):
        encoder.processor = SimpleNamespace(settings={"max_patches": 16, "resize_to_max_canvas": grows})
        sizes = [*dice.integers(1, 4000, (300, 2)).tolist(), *(2 ** dice.uniform(0, 12, (300, 2))).astype(int).tolist()]
        sizes += [(300, 300), (336, 336), (337, 336), (672, 336), (1000, 1500), (5376, 336), (5377, 336)]
        expected = published_canvases(sizes, 336, 16, grows)
        found = [(encoder.canvas(*size), encoder.fitted(*size, encoder.canvas(*size))) for size in sizes]
        assert found == expected


def test_resize_matches_pillow_except_rounding() -> None:
    rows, columns = np.mgrid[0:90, 0:70]
    smooth = np.stack([rows * 2, columns * 3, rows + columns], 2).astype(np.uint8)
    pixels = torch.from_numpy(smooth).permute(2, 0, 1).contiguous()
    for filter_ in (2, 3):
        for height, width in ((30, 50), (140, 200), (90, 71)):
            pillow = np.asarray(Image.fromarray(smooth).resize((width, height), filter_)).astype(int)
            assert np.abs(resize(pixels, height, width, filter_).permute(1, 2, 0).numpy() - pillow).max() <= 1
    with pytest.raises(UserError, match=r"^preprocessor_config.json: resample 1 "):
        resize(pixels, 30, 50, 1)


def test_gemma3_row_matches_published_processor() -> None:
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    skeleton = media_model(tiny_model("gemma3", "fp32")).model
    build = recipe_of("gemma3").modalities
    own, pictures = copy(tokenizer("gemma3")), [picture(40, 60), picture(300, 600, 1)]
    names = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    for name, token in names.items():
        object.__setattr__(own, name, token)
        object.__setattr__(own, f"{name}_id", own.convert_tokens_to_ids(token))
    for scans in (False, True):
        modalities = build(skeleton, None, {"image": {"pan_and_scan": scans}})
        encoder: Any = modalities["image"].encoder
        processor = Gemma3Processor(encoder.processor, own, image_seq_length=encoder.tile_placeholders)
        values = [media.value for media in pictures]
        expected = processor(
            text="What <start_of_image> is <start_of_image>\nthat?",
            images=values,
            do_pan_and_scan=scans,
            return_tensors="pt",
        )
        renderer = Renderer(own, False, modalities)
        row = {"text": "What <image> is <image>\nthat?", "images": values}
        assert renderer.render(row).input_ids.tolist() == expected["input_ids"][0].tolist()
        pixels = torch.cat([encoder.prepare(media)["pixels"] for media in pictures])
        torch.testing.assert_close(pixels, expected["pixel_values"], rtol=0, atol=0)
        assert len(pixels) == (4 if scans else 2)


def test_minicpm_image_numbers_match_published_processor() -> None:
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

    own = SimpleNamespace(image_id_start_token="<image_id>", image_id_end_token="</image_id>")
    pictures = [picture(40, 60), picture(200, 90, 1)]
    encoder: Any = read("minicpmv4_7")["image"].encoder
    texts = [published_text("minicpmv4_7", media, encoder) for media in pictures]
    first, second = MiniCPMV4_6Processor._prepend_local_ids(own, ["<|image_pad|><|image_pad|>"], texts, "<|image_pad|>")
    written = tokenizer("minicpmv4_7").decode(write("minicpmv4_7", [pictures[0], " and ", pictures[1]]).input_ids)
    assert f"{first} and {second}" in written
    assert "<slice>" in second


def test_white_space_around_images_survives_trimming_templates() -> None:
    own = copy(tokenizer("gemma3"))
    own.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
        "{% endfor %}"
    )
    renderer = Renderer(own, False, read("gemma3"))
    content = [{"type": "image", "image": picture(40, 60).value}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": "A square."}
    rendered = renderer.render({"messages": [{"role": "user", "content": content}, answer]})
    soft = "<image_soft_token>" * 16
    expected = f"<|im_start|>user\n\n\n<start_of_image>{soft}<end_of_image>\n\nWhat?<|im_end|>\n"
    assert own.decode(rendered.input_ids).startswith(expected)
    assert own.decode(rendered.input_ids[rendered.is_target]) == "A square.<|im_end|>"
    asked = renderer.question({"messages": [{"role": "user", "content": content}, answer]})
    assert own.decode(asked.prompt.input_ids).startswith(expected)


def test_gemma4_audio_layout_matches_published_processor() -> None:
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    modality = read("gemma4")["audio"]
    own = SimpleNamespace(boa_token="<|audio>", audio_token="<|audio|>", eoa_token="<audio|>")
    for seconds in (0.03, 0.4, 0.71, 1.0, 2.345):
        media = sound(seconds)
        inputs = modality.encoder.extractor([media.value], return_tensors="np")
        size = modality.encoder.measure(media)
        written = "".join(run if isinstance(run, str) else modality.placeholder * run for run in size.layout)
        assert written == Gemma4Processor.replace_audio_token(own, inputs, 0)
        assert modality.encoder.count_placeholders(modality.encoder.prepare(media)) == size.num_placeholders
    with pytest.raises(BadMedia, match="too short"):
        modality.encoder.measure(sound(0.005))
    with pytest.raises(BadMedia, match="30"):
        modality.encoder.measure(sound(31.0))


# ---------------------------------------------------------------- folders, in and out


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_text_matches_transformers(family: str, tmp_path: Path) -> None:
    reference = publish(family, tmp_path / "model")
    writer = load_chat_model(tmp_path / "model")
    answers = []
    conversations = []
    prompts: Sequence[Any] = [
        ["One plus one?"],
        [picture(40, 60), "What is it?"],
        ["See ", picture(90, 40, 1), picture(9, 9)],
    ]
    for contents in prompts:
        parts = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part.value}
            for part in contents
        ]
        messages = [{"role": "user", "content": parts}]
        conversations.append(messages)
        prompt = writer.renderer.prompt(messages)
        inputs = reference_inputs(family, prompt, torch.float32, writer.modalities)
        never = writer.renderer.placeholders
        stops = [writer.tokenizer.eos_token_id, *writer.renderer.end_of_turn()]
        told = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": stops, "suppress_tokens": never}
        expected = reference.generate(**inputs, **told)[0, len(prompt.input_ids) :].tolist()
        ids = [token for piece in writer.write(messages, Sampling(temperature=0), max_tokens=12) for token in piece.ids]
        assert ids == expected[: len(ids)]
        assert len(ids) == 12 or len(expected) == len(ids) + 1  # it may stop at once
        answers.append(tuple(ids))
    assert len(set(answers)) == len(answers)  # pictures matter
    together = writer.write_all(conversations, Sampling(temperature=0), max_tokens=12, batch=3)
    assert [tuple(token for piece in pieces for token in piece.ids) for pieces in together] == answers
    layer_types = getattr(reference.config.get_text_config(), "layer_types", None) or ()
    can_join = "linear_attention" not in layer_types  # caches of recurrent layers cannot be joined
    assert writer.support.is_checked == can_join
    assert (writer.support.obstacle is None) == can_join


def train_from(family: str, folder: Path, out: Path, *args: str) -> list[str]:
    """Arguments that train the published `folder` on the family's own example rows, by nothing at all."""
    config = yaml.safe_load((ROOT / f"examples/published/{family}.yaml").read_text())
    config["model"] = {"path": str(folder), "modalities": config["model"].get("modalities", {})}
    config["data"]["sources"][0]["path"] = str(ROOT / config["data"]["sources"][0]["path"])
    config["train"] |= {"steps": 1, "packs_per_step": 4, "lr": 1e-30, "warmup_steps": 0}
    config |= {"log": {"dir": str(out / "run")}, "checkpoint": {"every": 1}, "optimizer": {"weight_decay": 0.0}}
    (out / "config.yaml").write_text(yaml.safe_dump(config))
    return [str(out / "config.yaml"), *args]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [family if family == "gemma4" else pytest.param(family, marks=pytest.mark.long) for family in FAMILIES]
)
def test_weights_round_trip_through_two_ranks(family: str, tmp_path: Path) -> None:
    """In and out, key by key and bit by bit; where there are experts, each rank had half of them."""
    reference = publish(family, tmp_path / "model")
    layout = ["--parallel.ep", "2"] if read_facts(reference).experts else []
    args = train_from(family, tmp_path / "model", tmp_path, *layout)
    result = train_on_ranks(args, 2)
    assert result.code == 0, result.stderr
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = (read_weights(tmp_path / name) for name in ("model", "out"))
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
    again = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out").eval()
    inputs = reference_inputs(family, write(family, mix(family)[0]), torch.float32)
    with torch.no_grad():
        assert torch.equal(
            again(**inputs).logits, AutoModelForMultimodalLM.from_pretrained(tmp_path / "model").eval()(**inputs).logits
        )


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# ---------------------------------------------------------------- facts, and bad input


@pytest.mark.parametrize("family", FAMILIES)
def test_recipe_names_existing_modules(family: str) -> None:
    model, recipe = tiny_model(family, "fp32"), recipe_of(family)
    facts = read_facts(model)
    fields = example(family)["config"]
    depth = sum(part.get("num_hidden_layers", 0) for name, part in fields.items() if name.endswith("_config"))
    assert len(facts.blocks) == depth  # and none is nested in another
    assert not recipe.blocks or {type(model.get_submodule(name)).__name__ for name in facts.blocks} == set(
        recipe.blocks
    )
    for names in [module.projectors for module in recipe.media_modules]:
        assert all(any(True for _ in model.get_submodule(name).parameters()) for name in names)
    for name, modality in recipe.modalities(model, None, {}).items():
        assert not list(modality.encoder.parameters())  # they are the model's, and only the model's
        assert getattr(model.config, f"{name}_token_id") == tokenizer(family).convert_tokens_to_ids(
            modality.placeholder
        )


def test_gemma4_without_audio_config_has_no_audio() -> None:
    fields = {key: value for key, value in example("gemma4")["config"].items() if key != "audio_config"}
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(type(tiny_config("gemma4"))(**fields | {"audio_config": None}))
    media = media_model(model)
    assert [module.modality for module in media.modules_of("encoder")] == ["image", "video"]
    assert list(media.modalities(ModelSection(config={"model_type": "gemma4"}))) == ["image", "video"]
    with pytest.raises(UserError, match=r"model.modalities: .* 'audio'.* image, video"):
        media.modalities(ModelSection(config={"model_type": "gemma4"}, modalities={"audio": {"encoder": {}}}))


def test_bad_input_raises_one_line(tmp_path: Path) -> None:
    model, build = tiny_model("gemma3", "fp32"), recipe_of("gemma3").modalities
    with pytest.raises(UserError, match=r"model.modalities.image.encoder.options: .*max_pixel"):
        build(model, None, {"image": {"max_pixel": 5000}})
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match=r"preprocessor_config.json: "):
        build(model, str(tmp_path), {})
    renderer = Renderer(tokenizer("gemma3"), False, read("gemma3"))
    with pytest.raises(BadRow, match="text contains '<start_of_image>'"):
        renderer.render({"text": "one <start_of_image> two"})
    with pytest.raises(UserError, match=r"^model\.modalities\.image: .*'<image_soft_token>'"):
        Renderer(bare_tokenizer(tmp_path), False, read("gemma3"))
    assert spec_of("gemma3").tokenizer


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama4", {"max_patches": 0}, r"max_patches is 0.* 16"),
        ("llama4", {"image_mean": [0.1, 0.2]}, r"image_mean is .0.1, 0.2."),
        ("llama4", {"do_resize": False}, r"preprocessor_config.json: do_resize"),
        ("gemma4_unified", {"max_soft_tokens": 71}, r"max_soft_tokens is 71.* 70, 140, 280"),
        ("kimi_k25", {"size": {"shortest_edge": 9}}, r"preprocessor_config.json: size.max_height"),
        ("gemma3", {"image_mean": "x"}, r"preprocessor_config.json: image_mean is 'x'"),
        ("minicpmv4_7", {"rescale_factor": "x"}, r"rescale_factor is 'x'"),
    ],
)
def test_invalid_processor_settings_raise(family: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=message):
        recipe_of(family).modalities(tiny_model(family, "fp32"), str(tmp_path), {})


def test_options_override_folder_settings_for_tensors(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_patches": 9, "image_std": [0.25] * 3}))
    build, model = recipe_of("llama4").modalities, tiny_model("llama4", "fp32")
    encoder: Any = build(model, str(tmp_path), {})["image"].encoder
    assert encoder.canvas(100, 100) == (3, 3)
    assert encoder.prepare(picture(9, 9))["pixels"].max() > 1
    assert build(model, str(tmp_path), {"image": {"max_tiles": 4}})["image"].encoder.canvas(100, 100) == (2, 2)
    with pytest.raises(UserError, match=r"encoder.options: max_patches is 'many'.* 16"):
        build(model, None, {"image": {"max_tiles": "many"}})


def bare_tokenizer(folder: Path) -> Any:
    from fixtures import make_tokenizer

    return make_tokenizer(folder / "bare")


def test_options_override_folder_settings_override_defaults(tmp_path: Path) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    GotOcr2ImageProcessorPil(image_mean=[0.1] * 3, max_patches=6, size={"height": 9, "width": 9}).save_pretrained(
        tmp_path
    )
    model, build = tiny_model("internvl", "fp32"), recipe_of("internvl").modalities
    encoder: Any = build(model, str(tmp_path), {})["image"].encoder
    assert (encoder.processor.image_mean, encoder.processor.max_patches) == ((0.1,) * 3, 6)
    assert encoder.processor.size.height == encoder.edge == 32  # the model's own
    assert encoder.measure(picture(40, 400)).num_placeholders > 4 * encoder.tile_placeholders
    encoder = build(model, str(tmp_path), {"image": {"max_tiles": 2}})["image"].encoder
    assert encoder.measure(picture(40, 400)).num_placeholders == 3 * encoder.tile_placeholders
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["max_patches"] == 6


def test_split_image_gives_the_same_features() -> None:
    model, _ = ours("internvl", "fp64")
    encoder: Any = recipe_of("internvl").modalities(model, None, {})["image"].encoder
    media = picture(40, 400)
    size, inputs = encoder.measure(media), encoder.prepare(media)
    parts = encoder.split(size, inputs)
    assert len(parts) > 1
    assert sum(part.num_placeholders for part, _ in parts) == size.num_placeholders
    assert sum(part.cost for part, _ in parts) == pytest.approx(size.cost)
    with torch.no_grad(), keep_precision("fp64"):
        whole = encoder.encode([to_compute(inputs, CPU, torch.float64)])
        apart = [encoder.encode([to_compute(own, CPU, torch.float64)]) for _, own in parts]
    torch.testing.assert_close(torch.cat(apart), whole, rtol=1e-11, atol=1e-11)
