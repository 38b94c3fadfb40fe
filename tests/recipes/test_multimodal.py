"""Published omni models through our path (own encoders' calls, routed rows, packs) against Hugging Face's own forward.

Here in one process; `omnizoo verify` takes it from there to other layouts.
"""

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_styles import LAST_REASONS
from fixtures import make_tokenizer
from published import (
    DTYPE,
    clip,
    encoded,
    generation_inputs,
    gradients,
    loss_of,
    marks_of,
    mix,
    options_of,
    ours,
    packed_inputs,
    picture,
    publish,
    published_frames,
    question,
    read,
    reference_inputs,
    sound,
    tiny_config,
    tiny_model,
    write,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM

from omnizoo.cli.generate import CONTROL
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.modalities.base import find_module
from omnizoo.modalities.item import MediaItem, Port
from omnizoo.modalities.media import BadMedia
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.hf_private import conversion_mapping, load_files
from omnizoo.models.interfaces import attention
from omnizoo.models.media.batch import to_compute
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.models.recipe import read_facts, recipe_of
from omnizoo.models.small_config import Shrinking, shrink_config
from omnizoo.ops.attention.packed import packed_attention
from omnizoo.ops.precision import keep_precision
from omnizoo.recipes.shared import qwen_audio, qwen_video
from omnizoo.recipes.shared.encoders import TowerEncoder
from omnizoo.rl.engine import Engine
from omnizoo.rl.rollouts import Rollout

# Between them they have every kind of tower; the others are made of the same parts, and run in `make verify-all`.
COVERING = ("qwen3_vl_moe", "qwen3_omni_moe_thinker", "qwen2_5_omni_thinker", "qwen3_5_moe", "glm4v_moe")
LONG = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
UNUSED = {"model.audio_tower.audio_bos_eos_token.weight"}  # of Qwen2.5-Omni: in its files, but nothing reads it
FAMILIES = [*COVERING, *(pytest.param(family, marks=pytest.mark.long) for family in LONG)]


@pytest.mark.parametrize(("precision", "loss_error", "gradient_error"), [("fp32", 1e-6, 1e-5), ("fp64", 1e-11, 1e-10)])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_pack_losses_and_gradients_match_separate_samples(
    family: str, precision: str, loss_error: float, gradient_error: float
) -> None:
    if "qwen3_5" in family and precision == "fp32":
        pytest.skip("its own fp32 gradients are 1e-4 away from those in fp64, and so are ours: fp64 tells")
    model, modalities = ours(family, precision)
    reference = deepcopy(tiny_model(family, precision))
    samples = [write(contents, modalities, seed) for seed, contents in enumerate(mix(family))]
    labels = [sample.labels for sample in samples]
    with keep_precision(precision):
        expected = torch.zeros((), dtype=DTYPE[precision])
        for sample in samples:
            out = reference(**reference_inputs(family, sample, modalities, DTYPE[precision]), use_cache=False)
            expected = expected + loss_of(out.logits, sample.labels)
        logits = model(**packed_inputs(family, samples, modalities, model)).logits
        loss = loss_of(logits, torch.cat(labels))
    expected.backward()
    loss.backward()
    assert abs(loss - expected) <= loss_error * abs(expected)
    wanted, found = gradients(reference), gradients(model)
    assert wanted.keys() == found.keys() == set(dict(model.named_parameters())) - UNUSED  # all towers, every level
    # A bias of keys moves all logits of a query alike, which softmax does not see: its gradient is only rounding.
    scale = {name: wanted[name.replace("k_proj.bias", "q_proj.bias")].norm() for name in wanted}
    worst = {name: ((found[name] - value).norm() / scale[name]).item() for name, value in wanted.items()}
    assert max(worst.values()) <= gradient_error, max(worst, key=worst.__getitem__)


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_attends_once_per_layer_and_matches_single_frames(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the model's own way in, with torch's attention, which splits by the lengths of frames and windows."""
    calls: list[int] = []

    def counted(query: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(query.shape[2])
        return packed_attention(query, *args)

    monkeypatch.setattr(attention, "packed_attention", counted)
    model, modalities = ours(family, "fp32")
    own = deepcopy(tiny_model(family, "fp32"))
    built = media_model(model).modalities(ModelSection(config={"model_type": family}))
    encoders = {name: modality.encoder for name, modality in built.items()}
    media = {
        "image": [picture(40, 60), picture(90, 50, 1)],
        "video": [clip(9, 40, 64), clip(4, 64, 32, 3)],
        "audio": [sound(1.3), sound(9.5, 1)],  # less than a window, and more
    }
    for name, encoder in encoders.items():
        items = [modalities[name].encoder.prepare(item) for item in media[name]]
        calls.clear()
        model.zero_grad()
        own.zero_grad()
        found = encoder.encode(items)
        layers = encoder.tower.layers if name == "audio" else encoder.tower.blocks
        assert len(calls) == len(layers)
        if name == "audio":
            mels = [item["mels"] for item in items]
            mask = torch.arange(max(map(len, mels))) < torch.tensor([[len(mel)] for mel in mels])
            features = torch.nn.utils.rnn.pad_sequence(mels, batch_first=True).transpose(1, 2)
            wanted = own.get_audio_features(features, mask.long(), return_dict=True).last_hidden_state
        else:
            pixels, grids = torch.cat([item["pixels"] for item in items]), torch.stack([i["grid"] for i in items])
            features = own.get_video_features if name == "video" else own.get_image_features
            out = features(pixels, grids, return_dict=True)
            levels = (out.pooler_output, *getattr(out, "deepstack_features", ()))
            wanted = torch.cat([torch.cat(level) for level in levels], 1)
        assert (found - wanted).norm() < 1e-6 * wanted.norm()
        grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
        found.backward(grad)
        wanted.backward(grad)
        ours_by_name, theirs = gradients(model), gradients(own)
        assert ours_by_name.keys() == theirs.keys()
        for key, gradient in theirs.items():
            assert (ours_by_name[key] - gradient).norm() <= 1e-6 * gradient.norm().clamp(min=1e-6), key


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_is_called_once_for_images_and_videos(family: str) -> None:
    model, modalities = ours(family, "fp32")
    called: list[str] = []
    for name in set(encoded(family).values()):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    samples = [write(contents, modalities, seed) for seed, contents in enumerate(mix(family))]
    with torch.no_grad():
        model(**packed_inputs(family, samples, modalities, model))
    assert sorted(called) == sorted(set(encoded(family).values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_features_do_not_depend_on_other_items(family: str) -> None:
    media = {
        "image": [picture(40, 60), picture(300, 20, 1), picture(33, 33, 2)],
        "video": [clip(2, 64, 64), clip(9, 40, 90, 1), clip(1, 64, 32, 2)],
        "audio": [sound(0.31), sound(2.0, 1), sound(0.97, 2), sound(9.2, 3), sound(0.03, 4)],
    }
    model = tiny_model(family, "fp64")
    for name, modality in recipe_of(family).modalities(model, None, options_of(family)).items():
        encoder = modality.encoder
        items = [to_compute(encoder.prepare(item), torch.device("cpu"), torch.float64) for item in media[name]]
        with torch.no_grad(), keep_precision("fp64"):
            alone = [encoder.encode([item]) for item in items]
            together = encoder.encode(items)
        assert [len(rows) for rows in alone] == [encoder.measure(item).num_placeholders for item in media[name]]
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-11, atol=1e-11)
        assert len(encoder.encode([to_compute(encoder.dummy_input(), torch.device("cpu"), torch.float64)])) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_split_item_gives_the_same_features(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_video, "PATCHES_PER_PART", 16)
    monkeypatch.setattr(qwen_audio, "WINDOWS_PER_PART", 1)
    model = tiny_model(family, "fp64")
    long = {"video": clip(22, 90, 64), "audio": sound(19.3)}
    for name, modality in recipe_of(family).modalities(model, None, options_of(family)).items():
        encoder, media = modality.encoder, long.get(name, picture(200, 200))
        size, inputs = encoder.measure(media), encoder.prepare(media)
        parts = encoder.split(size, inputs)
        assert (len(parts) > 2) == (name in long)
        assert sum(part.num_placeholders for part, _ in parts) == size.num_placeholders
        assert sum(part.cost for part, _ in parts) == pytest.approx(size.cost)
        assert [encoder.count_placeholders(own) for _, own in parts] == [part.num_placeholders for part, _ in parts]
        assert all(own.keys() == inputs.keys() for _, own in parts)
        on_host = torch.device("cpu")
        with torch.no_grad(), keep_precision("fp64"):
            whole = encoder.encode([to_compute(inputs, on_host, torch.float64)])
            apart = [encoder.encode([to_compute(own, on_host, torch.float64)]) for _, own in parts]
        torch.testing.assert_close(torch.cat(apart), whole, rtol=1e-11, atol=1e-11)
        if name not in long:
            continue
        # Whatever the runs of its places, each part has its own.
        spans = ((3, 2), (9, size.num_placeholders - 5), (9 + size.num_placeholders, 3))
        items = MediaItem(Port(name, "encoder"), size, spans, False, media).cut(parts)
        tokens = [token for first, count in spans for token in range(first, first + count)]
        assert [token for item in items for first, n in item.spans for token in range(first, first + n)] == tokens
        assert [sum(n for _, n in item.spans) for item in items] == [part.num_placeholders for part, _ in parts]


def test_short_audio_features_match_padded_batch() -> None:
    model = tiny_model("qwen3_omni_moe_thinker", "fp64")
    encoder = read("qwen3_omni_moe_thinker")["audio"].encoder
    encoder = type(encoder)(model, None)
    mels = [encoder.prepare(sound(seconds, 1))["mels"].double() for seconds in (0.4, 1.7)]
    features = torch.nn.utils.rnn.pad_sequence(mels, batch_first=True).transpose(1, 2)
    mask = torch.arange(features.shape[2]) < torch.tensor([[len(mel)] for mel in mels])
    with torch.no_grad():
        both = model.get_audio_features(features, mask.long(), return_dict=True).last_hidden_state
        short = encoder.encode([{"mels": mels[0]}])
    torch.testing.assert_close(short, both[: len(short)], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_gradients_without_media_are_zero(family: str) -> None:
    model, modalities = ours(family, "fp64")
    samples = [write([9], modalities, 0), write([6], modalities, 1)]
    logits = model(**packed_inputs(family, samples, modalities, model)).logits
    loss_of(logits, torch.cat([sample.labels for sample in samples])).backward()
    found = gradients(model)
    assert found.keys() == set(dict(model.named_parameters())) - UNUSED
    is_tower = tuple(f"{tower}." for tower in encoded(family).values())
    assert all(bool(grad.any()) != name.startswith(is_tower) for name, grad in found.items() if "embed" not in name)


@pytest.mark.parametrize("family", FAMILIES)
def test_recipe_names_existing_modules(family: str) -> None:
    model, recipe = tiny_model(family, "fp32"), recipe_of(family)
    kinds = {type(model.get_submodule(name)).__name__ for name in read_facts(model).blocks}
    assert kinds == set(recipe.blocks)  # and none is nested in another, as whole towers would be
    assert len(read_facts(model).blocks) == 3 + 3 + (2 if "audio" in encoded(family) else 0)
    for module in recipe.media_modules:
        assert all(name.startswith(f"{module.module}.") for name in module.projectors)
        assert all(any(True for _ in model.get_submodule(name).parameters()) for name in module.projectors)
    for name, modality in recipe.modalities(model, None, {}).items():
        assert not list(modality.encoder.parameters())  # they are the model's, and only the model's
        assert not list(modality.encoder.children())
        kind = "image" if "glm" in family else name  # whose clips are written as images
        assert getattr(model.config, f"{kind}_token_id") == marks_of(family)[modality.placeholder]


@pytest.mark.parametrize("family", FAMILIES)
def test_small_config_uses_every_component(family: str) -> None:
    small = shrink_config(
        AutoConfig.for_model(family, text_config={"num_attention_heads": 32, "num_key_value_heads": 4}), Shrinking()
    )
    config = AutoConfig.for_model(small.pop("model_type"), **small)
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(config)
    text, vision = config.text_config, config.vision_config
    table = model.get_input_embeddings().weight.numel()
    assert sum(weight.numel() for weight in model.parameters()) - 2 * table < 25e6  # most of them experts'
    assert text.hidden_size == getattr(vision, "out_hidden_size", vision.hidden_size)
    assert "audio" not in encoded(family) or text.hidden_size == config.audio_config.output_dim
    if hasattr(vision, "deepstack_visual_indexes"):
        assert len(vision.deepstack_visual_indexes) == vision.depth == text.num_hidden_layers - 1 == 2
    if hasattr(vision, "fullatt_block_indexes"):
        assert len(vision.fullatt_block_indexes) == 1 < vision.depth
    turning = 16 * text.rope_parameters.get("partial_rotary_factor", 1)
    assert sum(text.rope_parameters["mrope_section"]) == turning // 2
    assert min(text.rope_parameters["mrope_section"]) > 0


def test_video_steps_and_times_match_published_processor() -> None:
    from transformers import Qwen3VLProcessor

    modality = read("qwen3_vl")["video"]
    media = clip(9, 64, 96)
    _, steps, (height, width) = modality.encoder.sample(media)
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
        _calculate_timestamps=lambda *args: Qwen3VLProcessor._calculate_timestamps(None, *args),
    )
    grid = torch.tensor([[len(steps), height // 16, width // 16]])
    metadata = SimpleNamespace(fps=4.0, frames_indices=published_frames("qwen3_vl", 9, 4.0, fps=4.0))
    video = {"video_grid_thw": grid, "video_metadata": [metadata]}
    size = modality.encoder.measure(media)
    written = "".join(run if isinstance(run, str) else "<|video_pad|>" * run for run in size.layout)
    assert written == Qwen3VLProcessor.replace_video_token(processor, video, 0)
    assert read("qwen3_omni_moe_thinker")["video"].encoder.measure(media).layout == ()


def text_of_video(folder: Path, outer_markers: bool) -> str:
    """The text of a row with a video, with one character for each run of placeholders."""
    options = {} if outer_markers else {"video": {"outer_markers": False}}
    model = tiny_model("qwen3_vl", "fp32")
    modalities = recipe_of("qwen3_vl").modalities(model, None, options)
    renderer = Renderer(
        make_tokenizer(folder, special_tokens=tuple(marks_of("qwen3_vl"))),
        True,
        modalities,
        positions=media_model(model).positions,
    )
    content = [{"type": "video", "video": clip(9, 64, 96).value, "fps": 4.0}, {"type": "text", "text": "what?"}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]}
    rendered = renderer.render(row)
    text = renderer.tokenizer.decode(rendered.input_ids)
    return re.sub(r"(<\|video_pad\|>)+", "V", text)


def test_video_has_doubled_vision_markers_by_default_as_in_transformers_5(tmp_path: Path) -> None:
    begin, end = "<|vision_start|>", "<|vision_end|>"
    doubled = text_of_video(tmp_path, outer_markers=True)
    plain = text_of_video(tmp_path, outer_markers=False)
    steps = [f"<{seconds} seconds>{begin}V{end}" for seconds in re.findall(r"<([\d.]+) seconds>", plain)]
    assert len(steps) > 1
    assert f"{begin}{''.join(steps)}{end}what?" in doubled
    assert "".join(steps) + "what?" in plain
    assert plain.count(begin) == len(steps)


def test_sample_of_earlier_turn_with_reasoning_has_only_its_images(tmp_path: Path) -> None:
    """`data.thinking: template` with a template that drops the reasoning of earlier turns."""
    modalities = recipe_of("qwen3_vl").modalities(tiny_model("qwen3_vl", "fp32"), None, {})
    fast = make_tokenizer(tmp_path, LAST_REASONS, special_tokens=tuple(marks_of("qwen3_vl")))
    turns = []
    for number in range(2):
        turns.append({"role": "user", "content": f"<image>question {number}"})
        turns.append({"role": "assistant", "content": "a", "reasoning_content": f"thought {number}"})
    row = {"messages": turns, "images": [picture(64, 64).value, picture(32, 64, 1).value]}
    last, first = Renderer(fast, True, modalities).render_samples(row)
    assert [len(sample.items) for sample in (last, first)] == [2, 1]
    assert [item.spans for item in last.items[:1]] == [item.spans for item in first.items]
    learned = [fast.decode(sample.input_ids[sample.is_target]) for sample in (last, first)]
    assert learned == [f"<think>\nthought {number}\n</think>\n\na<|im_end|>" for number in (1, 0)]


def test_outer_markers_must_be_a_truth_value() -> None:
    with pytest.raises(UserError, match=r"^model\.modalities\.video\.encoder\.options\.outer_markers"):
        recipe_of("qwen3_vl").modalities(tiny_model("qwen3_vl", "fp32"), None, {"video": {"outer_markers": "no"}})


def test_video_patches_match_published_processor() -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    encoder = read("qwen3_vl")["video"].encoder
    media = clip(5, 64, 96)  # resized to itself; the fifth frame is a step with itself
    frames = torch.from_numpy(media.value).permute(0, 3, 1, 2)[None] / 255 * 2 - 1
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, frames, patch_size=16, merge_size=2, temporal_patch_size=2)
    prepared = encoder.prepare(media)
    assert prepared["grid"].tolist() == grid == [3, 4, 6]
    torch.testing.assert_close(prepared["pixels"], patches[0], rtol=0, atol=1e-6)


def test_options_override_folder_settings_override_defaults(tmp_path: Path) -> None:
    from transformers import Qwen2VLImageProcessorPil

    published = Qwen2VLImageProcessorPil(
        image_mean=[0.1] * 3, size={"shortest_edge": 4096, "longest_edge": 8192}, patch_size=16
    )
    published.save_pretrained(tmp_path)
    model, build = tiny_model("qwen3_vl", "fp32"), recipe_of("qwen3_vl").modalities
    encoder = build(model, str(tmp_path), {})["image"].encoder
    assert encoder.pixels == (4096, 8192)
    media = picture(100, 50)
    torch.testing.assert_close(
        encoder.prepare(media)["pixels"], published(images=media.value, return_tensors="pt")["pixel_values"]
    )
    assert build(model, str(tmp_path), {"image": {"max_pixels": 5000}})["image"].encoder.pixels == (4096, 5000)
    with pytest.raises(UserError, match=r"model.modalities.image.encoder.options: .*max_pixel"):
        build(model, None, {"image": {"max_pixel": 5000}})
    with pytest.raises(BadMedia, match="200 times"):
        encoder.measure(picture(2, 500))


def test_thinker_loads_from_complete_model_folder(tmp_path: Path) -> None:
    model = tiny_model("qwen3_omni_moe_thinker", "fp32")
    model.save_pretrained(tmp_path)
    weights = {f"thinker.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights | {"talker.model.norm.weight": torch.ones(3)}, tmp_path / "whole.safetensors")
    with torch.device("meta"):
        loaded = AutoModelForMultimodalLM.from_config(tiny_config("qwen3_omni_moe_thinker"))
    report = load_files(loaded, [tmp_path / "whole.safetensors"], conversion_mapping(loaded), torch.device("cpu"))
    assert (report.missing, report.unexpected, report.mismatched) == (set(), set(), {})
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_modalities_are_built_once_and_copied(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    make = TowerEncoder.__init__
    monkeypatch.setattr(
        TowerEncoder, "__init__", lambda self, *given: (built.append(type(self)), make(self, *given))[1]
    )
    spec = ModelSection(config={"model_type": family})
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(tiny_config(family))
    loaded = read_modalities(model, spec)["modalities"]
    media_model(model).attach(spec)
    own = media_model(model).modalities(spec)
    assert len(built) == len(own) == len(loaded)
    for name, modality in own.items():
        assert modality.encoder.model is model
        assert loaded[name].encoder.model is not model


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_text_matches_transformers(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = publish(family, tmp_path / "model")
    words, parts, images = question(family, tmp_path)
    again = {"type": "image", "image": images[1]}
    prompts: list[Any] = [[words], [parts[0], words], [*reversed(parts), words, again, words], [words, *parts]]
    if "glm" in family:  # whose own forward takes one kind of media at a time
        prompts[2:] = [[words, parts[0], again, words], [words, parts[1]]]
    writer = load_chat_model(tmp_path / "model")
    answers = []
    conversations = [[{"role": "user", "content": content}] for content in prompts]
    for messages, content in zip(conversations, prompts, strict=True):
        prompt = writer.renderer.prompt(messages)
        items = [replace(i, inputs=find_module(writer.modalities, i.port).prepare(i.media)) for i in prompt.items]
        assert len(items) == sum(part["type"] != "text" for part in content)
        inputs = generation_inputs(reference, prompt.input_ids.tolist(), items)
        never = {writer.tokenizer.convert_tokens_to_ids(m.placeholder) for m in writer.modalities.values()}
        written = reference.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=[writer.tokenizer.eos_token_id, *writer.renderer.end_of_turn()],
            suppress_tokens=sorted(never),  # nobody could tell what they stand for
        )
        expected = written[0, len(prompt.input_ids) :].tolist()
        (piece,) = writer.write(messages, Sampling(temperature=0), max_tokens=16)
        assert piece.ids == expected[: len(piece.ids)], family
        assert len(piece.ids) == 16 or len(expected) == len(piece.ids) + 1
        answers.append(tuple(piece.ids))
    assert len(set(answers)) == len(answers)  # media matter
    together = writer.write_all(conversations, Sampling(temperature=0), max_tokens=16, batch=3)
    assert [tuple(piece.ids) for (piece,) in together] == answers
    assert writer.support.is_checked or writer.support.obstacle is not None

    (tmp_path / "question.json").write_text(json.dumps([{"role": "user", "content": prompts[-1]}]))
    asked = ["generate", str(tmp_path / "model"), "--messages", str(tmp_path / "question.json")]
    assert main([*asked, "--temperature", "0", "--max-tokens", "16"]) == 0
    said = writer.tokenizer.decode(answers[-1], skip_special_tokens=True)
    assert capsys.readouterr().out.strip() == said.translate(CONTROL).strip()  # no command for the terminal


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_omni_moe_thinker"])
def test_engine_scores_match_transformers_generation(family: str, tmp_path: Path) -> None:
    reference = publish(family, tmp_path / "model")
    words, parts, _ = question(family, tmp_path)
    config: dict[str, Any] = {"model": {"path": str(tmp_path / "model")}, "log": {"dir": str(tmp_path / "run")}}
    config |= {"data": {"pack_tokens": 1024}, "train": {"losses": [{"kind": "gspo"}]}}
    with Engine.start(config) as engine:
        renderer = engine._reader.renderer
        rollouts, expected = [], []
        for content in ([words], [parts[0], words], [*reversed(parts), words]):
            messages = [{"role": "user", "content": content}]
            prompt = renderer.prompt(messages)
            items = [
                replace(i, inputs=find_module(engine._reader.modalities, i.port).prepare(i.media)) for i in prompt.items
            ]
            torch.manual_seed(0)
            out = reference.generate(
                **generation_inputs(reference, prompt.input_ids.tolist(), items),
                do_sample=True,
                top_k=0,
                num_return_sequences=3,
                max_new_tokens=8,
                suppress_tokens=renderer.placeholders,
                return_dict_in_generate=True,
                output_logits=True,
            )
            answers = out.sequences[:, len(prompt.input_ids) :]
            each = torch.stack(out.logits, 1).log_softmax(-1).gather(2, answers[..., None]).squeeze(2)
            rollouts += [Rollout(messages, answer) for answer in answers]
            expected += list(each)
        found = engine.log_probabilities(rollouts)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
        full = [
            replace(r, advantage=(-1.0) ** i, old=own) for i, (r, own) in enumerate(zip(rollouts, found, strict=True))
        ]
        assert engine.step(full)["loss/gspo/ratio"] == pytest.approx(1, abs=1e-5)
