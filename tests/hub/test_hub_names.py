"""Names on the hub are distinguished from paths, and a name with a commit stands for a folder in the cache."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from omnizoo.config.errors import UserError
from omnizoo.config.hub import local_path, parse_name, pinned_names, without_revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "repo", "inside", "revision", "commit"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "", None, None),
        ("org/name@v1.0", "org/name", "", "v1.0", None),
        ("org/name@refs/pr/1", "org/name", "", "refs/pr/1", None),
        (f"org/name@{COMMIT}", "org/name", "", None, COMMIT),
        (f"org/name@dev@{COMMIT}", "org/name", "", "dev", COMMIT),
        ("hub:gpt2", "gpt2", "", None, None),
        ("hub:org/name/a/b.jsonl@dev", "org/name", "a/b.jsonl", "dev", None),
        ("modelscope:org/name", "org/name", "", None, None),
    ],
)
def test_a_name_is_parsed_and_written_unchanged(
    text: str, repo: str, inside: str, revision: str | None, commit: str | None
) -> None:
    name = parse_name(text)
    assert name is not None
    assert (name.repo, name.inside, name.revision, name.commit) == (repo, inside, revision, commit)
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "/a/b",
        "./a/b",
        "../b",
        "~/b",
        "a/b/c",
        "rows.jsonl",
        "data/rows.jsonl",
        "s3://a/b",
        "hf://datasets/a/b",
        "a",
        "",
    ],
)
def test_a_path_is_not_a_name(text: str) -> None:
    assert parse_name(text) is None
    assert local_path(text) == text


def test_an_existing_folder_takes_precedence_unless_the_name_has_a_prefix_or_a_commit(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse_name("org/name") is None
    assert parse_name("org/other") is None  # misspelled: the folder `org` is here
    assert parse_name("hub:org/name") is not None
    assert parse_name(f"org/name@{COMMIT}") is not None


@pytest.mark.parametrize("text", ["hub:", "hub:a b", "hub:../x", "hub:/etc/passwd", "modelscope:a//b", "hub:a/../b"])
def test_a_prefix_without_a_valid_name_raises(text: str) -> None:
    with pytest.raises(UserError, match=rf"^{text}: "):
        parse_name(text)


def test_a_name_with_a_commit_stands_for_a_folder_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/cache")
    assert local_path(f"org/name@main@{COMMIT}") == f"/cache/models--org--name/snapshots/{COMMIT}"
    assert local_path(f"hub:org/name/vae@{COMMIT}") == f"/cache/models--org--name/snapshots/{COMMIT}/vae"
    assert local_path(f"org/rows@{COMMIT}", "dataset") == f"/cache/datasets--org--rows/snapshots/{COMMIT}"
    assert local_path("org/name@main") == "org/name@main"
    assert without_revision(f"hub:org/rows@main@{COMMIT}") == "hub:org/rows"
    saved = {"a": [f"org/name@{COMMIT}", "org/other"], "b": {"c": f"org/name@{COMMIT}", "d": 1}}
    assert [str(name) for name in pinned_names(saved)] == [f"org/name@{COMMIT}"]
