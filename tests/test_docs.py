"""The docs are true: links lead somewhere, commands parse, keys exist, code imports public names, the site builds."""

import ast
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from processes import run_on_ranks
from tiny import model_config, write_config

import omnizoo
from omnizoo.cli.parser import parse
from omnizoo.config import reference
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.parallel.collective_counter import CollectiveCounter
from omnizoo.parallel.layout import plan_layout
from omnizoo.parallel.process import Process

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = (DOCS / "_build", DOCS / "_generated", DOCS / "reference" / "configuration")
FOLDERS = ("tutorials", "how-to", "reference", "explanation", "project")


def site_pages() -> Iterator[Path]:
    """Yield the hand-written pages of the site."""
    yield DOCS / "index.md"
    for folder in FOLDERS:
        for page in sorted((DOCS / folder).rglob("*.md")):
            if not any(page.is_relative_to(generated) for generated in GENERATED):
                yield page


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *site_pages()]
# The log of experiments may name files and keys that no longer exist.
CURRENT = [page for page in PAGES if page.name != "experiments.md"]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.M | re.S)
EXAMPLE = ROOT / "examples" / "text_tiny.yaml"
KEYS = {key: kind for key, kind, *_ in reference.all_keys()}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
current_pages = pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.relative_to(ROOT).as_posix())


def code_spans(page: Path) -> list[str]:
    """What stands in single backticks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))


def code_lines(page: Path) -> list[str]:
    """Lines of code blocks, and code in the text."""
    blocks = [block.replace("\\\n", " ") for _, block in FENCE.findall(page.read_text())]
    return [line for block in blocks for line in block.splitlines()] + code_spans(page)


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of every `omnizoo ...` that is shown, by itself or under torchrun."""
    for line in code_lines(page):
        found = re.match(r"(?:torchrun .*?-m |srun .*? |python -m )?omnizoo ([^>]+)", line)
        if found:
            yield shlex.split(found[1], comments=True)


def anchors(page: Path) -> set[str]:
    """Names that GitHub gives to headings, including those of generated parts and files that the page includes."""
    text = page.read_text()
    for name in re.findall(r"^:::\{include\} (\S+)", text, re.M):
        included = page.parent / name
        text += "\n" + included.read_text() if included.exists() else ""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_relative_links_lead_to_existing_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not heading or heading in anchors(target), f"{page.name}: {link}"


@current_pages
def test_named_repository_files_exist(page: Path) -> None:
    file_names = r"(?:omnizoo|tests|docs|examples|benchmarks)/[\w./-]*\w|[\w./-]+\.(?:py|md|toml)"
    text = page.read_text()
    created = {f"{name}.py" for name in re.findall(r"omnizoo new modality (\w+)", text)}  # by the reader
    created |= set(re.findall(r"Write `([\w.]+)`:", text))
    for word in (word for line in code_lines(page) for word in line.split()):
        if re.fullmatch(file_names, word) and word.removeprefix("test_") not in created:
            assert (ROOT / word).exists(), f"{page.name}: {word}"


def test_step_page_names_existing_files_and_functions() -> None:
    walk = re.findall(
        r"^\| \[[\w/.]+\]\((?:\.\./)+(omnizoo/[\w/.]+)\) \| (`[^|]+`) \|",
        (DOCS / "explanation/step.md").read_text(),
        re.M,
    )
    assert len(walk) > 12
    for file, names in walk:
        source = (ROOT / file).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            owner, _, method = name.rpartition(".")
            assert not owner or f"class {owner}" in source, f"{file}: {name}"
            assert re.search(rf"(?:def|class) {method}\b", source), f"{file}: {name}"


@current_pages
def test_named_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {found[1] for line in code_lines(page) if (found := re.match(r"make ([\w-]+)", line))}
    assert named <= targets


@current_pages
def test_shown_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    for args in commands(page):
        shows_help = any(argument.startswith("--help") for argument in args)
        if len(args) == 1 or shows_help:  # a command by its name
            with pytest.raises(SystemExit) as ended:
                parse(args if shows_help else [args[0], "--help"])
            assert ended.value.code == 0, args
            continue
        parsed = parse(args)
        if args[0] == "train":
            # my.yaml and the like are the reader's own
            config = load_config(parsed.config if Path(parsed.config).exists() else EXAMPLE, parsed.overrides)
            plan_layout(config.parallel, parsed.nproc or 1)


@current_pages
def test_mentioned_config_keys_exist(page: Path) -> None:
    sections = "|".join(reference.sections())
    for span in code_spans(page):
        found = re.match(rf"(?:--)?((?:{sections})(?:\.\w+)+)(?=$|[:=, ])", span)
        if found and not re.search(r"\.(py|md|json|jsonl|yaml|safetensors)$", found[1]):
            key = reference.schema_key(found[1])
            mappings = {known for known in KEYS if "mapping" in KEYS[known].split(" or ")}
            below_mapping = any(key.startswith(f"{known}.") for known in mappings)
            assert key in KEYS or below_mapping, f"{page.name}: {span}"


@current_pages
def test_shown_configs_are_valid(page: Path) -> None:
    base = yaml.safe_load(EXAMPLE.read_text())
    base.pop("evaluation", None)  # a `data` section that is shown may have nothing held out
    for language, block in FENCE.findall(page.read_text()):
        if language == "yaml":
            Config.model_validate(base | yaml.safe_load(block))


@current_pages
def test_code_fences_are_closed_and_readable_by_these_tests(page: Path) -> None:
    # A directive with backticks would be taken for the end of a code block; directives are written with colons.
    assert "```" not in FENCE.sub("", page.read_text()), "a code fence is not closed, or has more than a language"


@current_pages
def test_python_code_uses_only_public_names(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text()):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "omnizoo":
                assert node.module == "omnizoo", f"{page.name}: {node.module} is internal"
                assert {alias.name for alias in node.names} <= set(omnizoo.__all__)
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("omnizoo.") for alias in node.names), page.name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "omnizoo":
                assert node.attr in omnizoo.__all__, f"{page.name}: omnizoo.{node.attr}"


@pages
def test_no_line_is_longer_than_120_characters_except_tables(page: Path) -> None:
    lines = page.read_text().splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > 120 and not line.lstrip().startswith("|")]
    assert not long, f"{page.name}: lines {long}"


def test_readme_has_at_most_700_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_pages_named_in_the_package_exist() -> None:
    for path in (ROOT / "omnizoo").rglob("*"):
        if path.suffix in (".py", ".jinja", ".html"):
            for name in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
                assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {name}"


def test_metrics_page_names_every_metric_of_a_step() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    names: set[str] = set()
    for file, function in (("step_metrics.py", "step_metrics"), ("step.py", "metrics")):
        tree = ast.parse((ROOT / "omnizoo" / "training" / file).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                for inner in ast.walk(node):
                    keys = inner.keys if isinstance(inner, ast.Dict) else []
                    names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    assert "tokens_per_sec" in names
    assert not [name for name in names if f"`{name}`" not in page]


@pytest.mark.slow
def test_site_builds_without_warnings_and_loads_nothing_remote(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-E", "-q", "-d", str(tmp_path / "doctrees")]
    result = subprocess.run([*command, str(DOCS), str(tmp_path / "html")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    loaded = re.compile(r"""<(?:script|link|img|iframe|source|object|embed)\b[^>]*?(?:src|href|data)=["'](?:\w+:)?//""")
    for page in (tmp_path / "html").rglob("*.html"):
        assert not loaded.search(page.read_text()), page.name
    for style in (tmp_path / "html").rglob("*.css"):
        assert not re.search(r"(?:url\(|@import) *[\"']?(?:https?:)?//", style.read_text()), style.name


@pages
def test_pages_name_no_folder_of_a_local_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)\b", page.read_text())


FREED = ["--parallel.reshard_after_forward", "true"]  # the default, but for weights as few as those of a test
CASES = {
    "default": FREED,
    "kept": ["--parallel.reshard_after_forward", "false"],
    "each": [*FREED, "--parallel.reduce_each_micro_batch", "true"],
    "tied": [*FREED, "--model.config.tie_word_embeddings", "true"],
}


def count_collectives(process: Process, config_path: str, out: str) -> None:
    counts = {}
    for name, args in CASES.items():
        config = load_config(config_path, args)
        mesh = omnizoo.build_mesh(config, process)
        loader = omnizoo.build_loader(config, omnizoo.load_tokenizer(config.model), mesh.rank, mesh.layout.world)
        model = omnizoo.build_model(config.model, config.train.precision)
        omnizoo.parallelize_model(model, mesh, config)
        optimizer = omnizoo.build_optimizer(model, config)
        objective = omnizoo.build_objective(model, mesh, config)
        balancer = omnizoo.Balancer(model, mesh, config)
        with CollectiveCounter() as before:
            data = omnizoo.next_step(loader, balancer)
        with CollectiveCounter() as after:
            omnizoo.train_step(objective, optimizer, data, 1)
        counts[name] = {"before": before.calls, "after": after.calls}
    if mesh.is_first:
        Path(out).write_text(json.dumps(counts))


@pytest.mark.slow
def test_collectives_of_a_step_match_the_step_page(tmp_path: Path) -> None:
    out = tmp_path / "counts.json"
    family = model_config("qwen3") | {"tie_word_embeddings": False}
    model = {"config": family, "tokenizer": str(tmp_path / "tokenizer")}
    config = write_config(tmp_path, model=model, train={"packs_per_step": 8})
    result = run_on_ranks(count_collectives, 2, str(config), str(out))
    assert result.code == 0, result.stdout + result.stderr
    counts = json.loads(out.read_text())
    b, m = 2, 4  # blocks of the tiny model; 8 packs on two ranks, one at a time
    gathers = {name: counts[name]["after"]["all-gather"] for name in CASES}
    default = (b + 3) + m * b + (m - 1)
    assert gathers == {"default": default, "kept": b + 3, "each": m * (2 * b + 3), "tied": (b + 1) + m * b}
    scatters = {name: counts[name]["after"]["reduce-scatter"] for name in CASES}
    assert scatters == {"default": b + 3, "kept": b + 3, "each": m * (b + 3), "tied": b + 1}
    assert {counts[name]["after"]["all-reduce"] for name in CASES} == {1}  # norm, loss sums
    assert all("all-to-all" not in counts[name]["after"] for name in CASES)
    dealing = {"all-gather": 2, "all-to-all": 2}
    assert [counts[name]["before"] for name in CASES] == [dealing] * len(CASES)


def test_security_promises_name_existing_tests() -> None:
    table = (ROOT / "SECURITY.md").read_text().partition("## Promises")[2].partition("## What is not")[0]
    promises = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(promises) >= 10
    for promise in promises:
        named = re.findall(r"`tests/([\w/]+\.py)(?:::(\w+))?`", promise)
        assert named, promise
        for file, test in named:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text() if test else (ROOT / "tests" / file).is_file()


def test_diagrams_match_their_script() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/draw_diagrams.py"))["draw_all"]()
    for name, text in drawn.items():
        assert (ROOT / "docs/images" / name).read_text() == text, "run `python docs/draw_diagrams.py`"
