"""Every family of the zoo against one process, on the layouts that `omnizoo recipes` prints marks for."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.recipes.shared import encoders, glm_image, image_encoders, qwen_image, qwen_video
from omnizoo.recipes.zoo import CAPABILITIES, NO_MEDIA, OMNI_PROOF, PROOF, REFUSED, families
from omnizoo.training.causality_probe import probe
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.fp64_check import recheck_in_fp64
from omnizoo.verification.prepare import prepare, with_family

ROOT = Path(__file__).parents[2]
ZOO = {entry.family: entry for entry in families()}
# Every family that reads or produces media has a small config of its own, which says what it is.
OMNI = {
    yaml.safe_load(path.read_text())["model"]["config"]["model_type"]: path
    for path in sorted((ROOT / "examples/published").glob("*.yaml"))
}
# Each of these has its own kind of layer; the others are of the same kinds, or in test_recurrent.py, and
# run in `make verify-all`.
COVERING_OMNI = ("qwen3_omni_moe_thinker", "gemma3", "emu3")
COVERING = ("qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe", "lfm2", "nemotron_h")


# What is gathered and what is reduced follows from a family's blocks, and `uly2.ring2` shards them over all ranks, too;
# copies of shards are the same for all of them, and so `make test` has copies of these only.
COPIED = ("deepseek_v3", "qwen3_omni_moe_thinker")
# Attention of these is that of `qwen3` and `gemma3`, which are split over a ring in `make test`.
RING_LATER = ("qwen3_moe", "qwen3_omni_moe_thinker")


def marks_of(names: Iterable[str], covering: Sequence[str]) -> list[Any]:
    """(family, layouts that it is tried on). Those that others cover are left to `make verify-all`."""
    params = []
    for family in names:
        layouts = list(dict.fromkeys(layout for mark, layout in CAPABILITIES.items() if ZOO[family].proof(mark)))
        skipped = set() if family in COPIED else {CAPABILITIES["HSDP"]}
        if family in RING_LATER:
            skipped.add(CAPABILITIES["SP"])
        now = [layout for layout in layouts if layout not in skipped]
        later = [layout for layout in layouts if layout not in now]
        if family not in covering:
            params.append(pytest.param(family, layouts, marks=pytest.mark.long, id=family))
            continue
        params.append(pytest.param(family, now, id=family))
        if later:
            params.append(pytest.param(family, later, marks=pytest.mark.long, id=f"{family}-others"))
    return params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "marked"), marks_of([family for family, entry in ZOO.items() if not entry.is_omni], COVERING)
)
def test_family_agrees_with_one_process_on_any_layout(family: str, marked: list[str], tmp_path: Path) -> None:
    config = load_config(
        ROOT / "examples/text_tiny.yaml", ["--train.losses", "[{kind: cross_entropy}, {kind: balance, weight: 0.01}]"]
    )
    config = with_family(config, family)
    layouts = prepare(config, 4, ",".join(marked), "fp32", tmp_path)
    # As the command does it: gradients that one process gets wrong in fp32 are judged in fp64.
    verdicts = [recheck_in_fp64(config, layout, tmp_path, verdict_of(tmp_path, layout)) for layout in layouts]
    assert len(verdicts) == len(marked)
    assert [verdict.reason for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
def test_experts_inside_a_block_are_recomputed_selectively(tmp_path: Path) -> None:
    """Weights of experts are gathered inside of the block, and not alike in forward and in recomputation."""
    config = load_config(ROOT / "examples/text_tiny.yaml", ["--parallel.recompute", "selective"])
    (layout,) = prepare(with_family(config, "deepseek_v3"), 2, "dp2.ep2", "fp32", tmp_path)
    assert verdict_of(tmp_path, layout).reason == ""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "marked"), marks_of(OMNI, COVERING_OMNI))
def test_omni_family_agrees_with_one_process_on_any_layout(
    family: str, marked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(OMNI[family], [])
    layouts = prepare(config, 4, ",".join(marked), "fp32", tmp_path)
    verdicts = [recheck_in_fp64(config, layout, tmp_path, verdict_of(tmp_path, layout)) for layout in layouts]
    assert [verdict.reason for verdict in verdicts if not verdict.passed] == []


@pytest.mark.parametrize("family", REFUSED)
def test_refused_family_raises(family: str) -> None:
    assert family not in ZOO
    with pytest.raises(UserError):
        probe(ModelSection(config={"model_type": family}))


def test_proofs_name_existing_tests() -> None:
    for proof in (PROOF, OMNI_PROOF):
        file, _, function = proof.partition("::")
        assert (ROOT / file).samefile(__file__)
        assert function in globals()


def test_families_without_media_support_exist_without_recipe() -> None:
    assert set(NO_MEDIA) <= set(CONFIG_MAPPING_NAMES)
    assert not {family for family in NO_MEDIA if family in ZOO and ZOO[family].is_omni}


def test_shared_lines_count_imported_modules() -> None:
    def lines(*modules: ModuleType) -> int:
        return sum(len(Path(str(module.__file__)).read_text().splitlines()) for module in modules)

    assert "shared" not in ZOO
    assert ZOO["llama"].shared_lines == 0
    assert ZOO["llava"].shared_lines == lines(encoders, image_encoders)
    assert ZOO["glm4v_moe"].shared_lines == lines(encoders, glm_image, qwen_image, qwen_video)
    # GLM-4.1V imports the recipe of GLM-4.5V, which is a family itself.
    assert ZOO["glm4v"].shared_lines == ZOO["glm4v_moe"].shared_lines


def test_recipe_files_have_at_most_80_lines() -> None:
    assert max(entry.lines for entry in ZOO.values() if not entry.is_omni) <= 20
    assert max(entry.lines for entry in ZOO.values() if entry.is_omni) <= 80
    assert set(OMNI) == {family for family, entry in ZOO.items() if entry.is_omni}
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "mistral"} <= set(ZOO)
    assert {"gpt_oss", "deepseek_v3", "glm4_moe", "olmoe", "mixtral"} <= set(ZOO)
