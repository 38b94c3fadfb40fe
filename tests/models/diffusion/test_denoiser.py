"""Denoisers: folders and configs that are refused, attention that a recipe does not name, and bf16."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from denoiser_cases import CASES, make_folder
from torch.distributed import HashStore

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.build import build_model
from omnizoo.models.diffusion.denoiser import condition_shapes, noise_range, small_denoiser, split_denoiser
from omnizoo.models.diffusion.predict import predict
from omnizoo.models.diffusion.recipe import (
    Split,
    denoiser_recipe,
    diffusion_recipe_of,
    recipe_files,
    snake_case,
)
from omnizoo.models.diffusion.split import split_tokens
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model

CASE = CASES["wan"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("wan_two_experts", tmp_path_factory.mktemp("wan") / "pair")


def fields_of(pair: Path, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((pair / "transformer" / "config.json").read_text())
    return fields | changes


Fields = dict[str, Any]
REFUSED: dict[str, Callable[[Path], Fields]] = {
    r"^model\.config: MochiTransformer3DModel has no recipe": lambda pair: {
        "config": {"_class_name": "MochiTransformer3DModel"}
    },
    r"^model\.config\.num_layer: ": lambda pair: {"config": fields_of(pair, num_layer=3)},
    r"^model\.config: HunyuanVideoTransformer3DModel with image_condition_type": lambda pair: {
        "config": {"_class_name": "HunyuanVideoTransformer3DModel", "image_condition_type": "token_replace"}
    },
    r"^model\.part: .*transformer_3": lambda pair: {"path": str(pair), "part": "transformer_3"},
    r"^model\.part: .*no effect": lambda pair: {"path": str(pair / "transformer"), "part": "transformer"},
    r"^model\.path: AutoencoderKLWan has no recipe": lambda pair: {"path": str(pair / "vae")},
}


@pytest.mark.parametrize("message", REFUSED)
def test_unusable_model_is_refused(message: str, pair: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_model(ModelSection(**REFUSED[message](pair)), "fp32")
    assert "\n" not in str(caught.value)


def test_part_of_a_pair_has_its_range_of_noise(pair: Path) -> None:
    section = ModelSection(path=str(pair))
    assert noise_range(build_model(section, "fp32")) == (0.0, 1.0)
    for part, expected in {"transformer": (0.875, 1.0), "transformer_2": (0.0, 0.875)}.items():
        expert = build_model(section.model_copy(update={"part": part}), "fp32")
        assert type(expert) is diffusers.WanTransformer3DModel
        assert noise_range(expert) == expected


def test_small_copy_of_a_pair_has_the_same_conditions(pair: Path) -> None:
    small = small_denoiser(ModelSection(path=str(pair)))
    copy = build_model(ModelSection(config=small), "fp32")
    assert {name.partition(".")[0] for name, _ in copy.named_parameters()} == {"transformer", "transformer_2"}
    sizes = (4, 3, 6, 10), 7
    assert condition_shapes(small, *sizes) == condition_shapes(fields_of(pair), *sizes)


def test_attention_that_the_recipe_does_not_name_is_refused(pair: Path) -> None:
    model = build_model(ModelSection(path=str(pair), part="transformer"), "fp32")
    recipe = denoiser_recipe(model)
    assert recipe is not None
    assert recipe.split is not None
    incomplete: Split = replace(recipe.split, local_attention=())
    with pytest.raises(UserError, match=r"^parallel: .*blocks\.0\.attn2"):
        split_tokens(model, incomplete, recipe.trims_text)


def test_family_that_mixes_tokens_outside_attention_refuses_sequence_parallelism(tmp_path: Path) -> None:
    model = build_model(ModelSection(path=str(make_folder("sana", tmp_path / "sana"))), "fp32")
    with pytest.raises(UserError, match=r"^parallel\.ulysses: SanaTransformer2DModel"):
        split_denoiser(model)


def test_bf16_output_equals_that_of_diffusers_with_its_fp32_modules(pair: Path) -> None:
    folder = pair / "transformer"
    plain = diffusers.WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    batch = replace(CASE.batch(torch.bfloat16), share=CASE.batch().share)
    sections = {"model": {"path": str(folder)}, "train": {"precision": "bf16"}}
    config = load_config(sections, needs_data=False)
    with torch.no_grad(), process_group((0, 1, 0), HashStore()) as process:
        model = build_model(config.model, "bf16")
        parallelize_model(model, build_mesh(config, process), config)
        recipe = denoiser_recipe(model)
        assert recipe is not None
        output = predict(model, recipe, batch.noisy, batch.share, batch.condition)
        assert torch.equal(output, CASE.call(plain, batch))


def test_reference_page_lists_all_families_and_their_limits() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "diffusion.md").read_text()
    classes = re.findall(r"^\| `(\w+Model)` \| .* \| `", page, re.MULTILINE)
    assert sorted(snake_case(name) for name in classes) == recipe_files()
    for name in classes:
        for field in diffusion_recipe_of(name).unsupported:
            assert re.search(rf"^\| `{name}` \| .*`{field}`", page, re.MULTILINE), (name, field)
