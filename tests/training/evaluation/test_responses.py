"""Evaluation beyond the loss: sources told apart, answers to held-out questions, their metrics, and `omnizoo eval`."""

import json
import shutil
from pathlib import Path
from typing import Any

import own_metrics
import pytest
import torch
import torch.nn.functional as F
from fixtures import CHATML, make_tokenizer
from omni import MODALITIES, SENSOR, write_omni_config
from processes import run_on_ranks, train_in_this_world
from tiny import read_steps, write_config, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnizoo.cli.main import main
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.modalities.sampling import Sampling
from omnizoo.parallel.process import Process
from omnizoo.reporting.report import write_report
from omnizoo.reporting.run_folder import RunFolder

SHORT = {"steps": 4, "packs_per_step": 2, "lr": 1e-2}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def held_out(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    chats = write_rows(folder / "questions.jsonl", [chat("a first one?", "yes"), chat("a second one?", "no it is not")])
    texts = write_rows(folder / "stories.jsonl", [{"text": "once upon a time there was a capital of France"}])
    return {"eval_sources": [{"path": str(chats)}, {"path": str(texts)}]}


def config(folder: Path, **sections: Any) -> Path:
    data = held_out(folder) | sections.pop("data", {})
    train = SHORT | sections.pop("train", {})
    evaluation = {"every": 2} | sections.pop("evaluation", {})
    return write_config(folder, train=train, evaluation=evaluation, data=data, **sections)


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def reference(model: Any, tokenizer: Any, row: dict[str, Any]) -> tuple[float, int, int]:
    """Loss summed over the targets of a row, how many of them are the likeliest token, and how many there are; by
    transformers alone."""
    if "text" in row:
        ids = [*tokenizer(row["text"]).input_ids, tokenizer.eos_token_id]
        start = 1
    else:
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(row["messages"], tokenize=False).rstrip()
        ids, start = tokenizer(whole).input_ids, len(tokenizer(prompt).input_ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
    targets = torch.tensor(ids[start:])
    return (
        float(F.cross_entropy(logits, targets, reduction="sum")),
        int((logits.argmax(-1) == targets).sum()),
        len(targets),
    )


def test_losses_and_accuracy_by_source_match_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, evaluation={"every": 20, "metrics": ["accuracy"]}, train={"steps": 20})
    assert main(["train", str(path)]) == 0
    found = {key: value for key, value in read_steps(tmp_path / "run")[-1].items() if key.startswith("eval/")}
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    totals = []
    for name in ("questions", "stories"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        sums = [sum(figures) for figures in zip(*(reference(model, tokenizer, row) for row in rows), strict=True)]
        totals.append(sums)
        loss, right, count = sums
        assert found[f"eval/{name}/loss"] == pytest.approx(loss / count, rel=1e-5)
        assert found[f"eval/{name}/loss/text"] == found[f"eval/{name}/loss"]
        assert found[f"eval/{name}/accuracy"] == pytest.approx(right / count)
    loss, right, count = (sum(figures) for figures in zip(*totals, strict=True))
    assert found["eval/loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["eval/accuracy"] == pytest.approx(right / count)
    assert right > 0

    # The same from the command line, of the run and of its checkpoint; files are beside it.
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "run" / "eval" / "step_00000020" / "metrics.json").read_text())
    assert {key: written[key] for key in found} == found
    assert f"eval/questions/loss {found['eval/questions/loss']:.4f}" in " ".join(out.split())
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000020"
    assert main(["eval", str(path), "--checkpoint", str(checkpoint), "--out", str(tmp_path / "here")]) == 0
    assert json.loads((tmp_path / "here" / "metrics.json").read_text()) == written


def test_responses_match_generate_and_metrics_are_their_means(tmp_path: Path) -> None:
    own_metrics.seen.clear()
    metrics = ["exact_match", {"kind": "own_metrics:length", "options": {"most": 7}, "name": "short"}]
    path = config(tmp_path, evaluation={"samples": 3, "max_tokens": 6, "metrics": metrics})
    assert main(["train", str(path)]) == 0
    steps = read_steps(tmp_path / "run")
    assert [step.get("eval/exact_match") for step in steps] == [None, 0.0, None, 0.0]
    found = records(tmp_path / "run")
    assert [(record["step"], record["number"]) for record in found] == [(s, n) for s in (2, 4) for n in range(3)]
    assert [record["source"] for record in found[:3]] == ["questions", "stories", "questions"]  # in turn
    assert [record["expected"] for record in found[:3]] == ["yes", " was a capital of France", "no it is not"]
    assert steps[-1]["eval/short"] == sum(min(len(record["answer"]), 7) for record in found[3:]) / 3
    assert len(own_metrics.seen) == 6  # each answer once
    assert own_metrics.seen[0].row["messages"][0]["content"] == "a first one?"

    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    writer = load_chat_model(tmp_path / "out")
    for record, prompt in zip(found[3:], ("a first one?", None, "a second one?"), strict=True):
        if prompt is not None:
            pieces = writer.write([{"role": "user", "content": prompt}], Sampling(temperature=0), max_tokens=6)
            assert record["answer"] == writer.text(pieces)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Responses to held-out prompts, step 4" in page
    assert "a second one?" in page


def test_evaluation_does_not_change_training_or_resume(tmp_path: Path) -> None:
    evaluation: dict[str, Any] = {"every": 1, "samples": 2, "max_tokens": 4, "temperature": 1.0}
    evaluation["metrics"] = ["exact_match", "accuracy"]
    path = config(tmp_path, evaluation=evaluation, checkpoint={"every": 2, "keep": 9})
    never = ["--evaluation.every", "0", "--evaluation.samples", "0", "--evaluation.metrics", "[]"]
    dropout = ["--model.config.attention_dropout", "0.1"]
    assert main(["train", str(path), *dropout]) == 0
    assert main(["train", str(path), *dropout, *never, "--log.dir", str(tmp_path / "plain")]) == 0
    whole, plain = read_steps(tmp_path / "run"), read_steps(tmp_path / "plain")
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in whole] == [step[name] for step in plain]
    answers = records(tmp_path / "run")

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")  # as if it had been killed before
    assert main(["train", str(path), *dropout]) == 0
    timed = ("tokens_per_sec", "memory_gb", "data_wait", "mfu", "time", "seconds")
    again = read_steps(tmp_path / "run")
    assert len(again) == 4
    for before, after in zip(whole, again, strict=True):
        assert {k: v for k, v in before.items() if k not in timed} == {k: v for k, v in after.items() if k not in timed}
    assert records(tmp_path / "run") == answers  # none twice


def train_and_evaluate(process: Process, folder: str) -> None:
    place = Path(folder)
    assert train_in_this_world([place / "tiny.yaml", "--log.dir", place / "two", "--parallel.ulysses", 2]) == 0
    asked = ["eval", str(place / "run"), "--out", str(place / "eval"), "--allow-code", "own_metrics"]
    assert main(asked) == 0


@pytest.mark.slow
def test_evaluation_on_ranks_matches_one_process(tmp_path: Path) -> None:
    metrics = ["exact_match", "accuracy", "own_metrics:length"]
    path = config(tmp_path, evaluation={"samples": 2, "max_tokens": 4, "metrics": metrics}, train={"steps": 2})
    assert main(["train", str(path)]) == 0
    result = run_on_ranks(train_and_evaluate, 2, str(tmp_path))
    assert result.code == 0, result.stdout + result.stderr
    alone, together = read_steps(tmp_path / "run")[-1], read_steps(tmp_path / "two")[-1]
    keys = [key for key in alone if key.startswith("eval/")]
    assert len(keys) > 8
    for key in keys:
        assert together[key] == pytest.approx(alone[key], rel=1e-5), key
    answers = [[record["answer"] for record in records(tmp_path / name)] for name in ("run", "two")]
    assert answers[0] == answers[1]
    written = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    for key in keys:
        assert written[key] == pytest.approx(alone[key], rel=1e-5), key


def test_failing_metric_prints_its_name_and_the_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = ["own_metrics:raises", "own_metrics:words", "own_metrics:length"]
    path = config(tmp_path, evaluation={"every": 4, "samples": 3, "max_tokens": 2, "metrics": metrics})
    assert main(["train", str(path)]) == 0  # the run continues without the metric
    out = capsys.readouterr().out
    row = f"{tmp_path / 'questions.jsonl'}"
    assert f"evaluation.metrics.0: own_metrics:raises failed on {row}" in out
    assert "KeyError: 'no score'" in out
    assert "evaluation.metrics.1: own_metrics:words returned" in out
    last = read_steps(tmp_path / "run")[-1]
    assert (last["eval/raises"], last["eval/words"]) == (None, None)
    assert last["eval/length"] >= 0
    assert main(["eval", str(tmp_path / "run"), "--allow-code", "own_metrics"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "own_metrics:raises failed on" in err


def test_held_out_source_is_read_in_its_configured_format(tmp_path: Path) -> None:
    data = held_out(tmp_path)
    rows = write_rows(tmp_path / "tasks.jsonl", [{"instruction": "say yes", "output": "yes"}])
    data["eval_sources"] = [data["eval_sources"][0] | {"format": "messages"}, {"path": str(rows)}]
    assert main(["eval", str(config(tmp_path, data=data, evaluation={"samples": 3, "max_tokens": 2}))]) == 0
    folder = tmp_path / "run" / "eval" / "step_00000000"
    assert {"eval/questions/loss", "eval/tasks/loss"} <= json.loads((folder / "metrics.json").read_text()).keys()
    assert [record["expected"] for record in records(folder)] == ["yes", "yes", "no it is not"]


def test_plugin_of_run_folder_needs_allow_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, evaluation={"samples": 1, "metrics": ["nowhere.at_all:metric"]})
    (tmp_path / "run").mkdir()
    shutil.copy(path, tmp_path / "run" / "config.yaml")
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert "config.yaml: the plugin nowhere.at_all:metric" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "run"), "--allow-code", "nowhere"]) == 2
    assert "cannot import nowhere.at_all:metric" in capsys.readouterr().err
    assert main(["eval", str(path)]) == 2  # one's own config needs no leave
    assert "cannot import nowhere.at_all:metric" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("evaluation", "line"),
    [
        ({"metrics": ["exact_match"]}, "evaluation.samples is 0"),
        ({"samples": 1, "metrics": ["exakt_match"]}, "exact_match"),
        ({"samples": 1, "metrics": ["own_metrics:nothing"]}, "has no 'nothing'"),
        ({"samples": 1, "metrics": ["own_metrics:odd"]}, "own_metrics:odd("),
        ({"samples": 1, "metrics": ["own_metrics:NUMBER"]}, "evaluation.metrics.0: own_metrics:NUMBER is a int"),
        ({"samples": 1, "metrics": ["exact_match", "exact_match"]}, "evaluation.metrics.1: eval/exact_match"),
        (
            {"samples": 1, "metrics": [{"kind": "accuracy", "options": {"a": 1}}]},
            "evaluation.metrics.0: options.a: unknown option of accuracy",
        ),
    ],
)
def test_invalid_metric_raises_before_training(
    evaluation: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config(tmp_path, evaluation=evaluation))]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert line in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_best_checkpoint_and_early_stopping_use_any_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accuracy rises while it is learnt; of a metric that never rises, patience runs out."""
    metrics = ["accuracy", {"kind": "own_metrics:length", "options": {"most": 0}, "name": "flat"}]
    path = config(
        tmp_path,
        evaluation={
            "every": 1,
            "samples": 1,
            "max_tokens": 2,
            "metrics": metrics,
            "early_stop": {"metric": "eval/flat", "patience": 3},
        },
        train={"steps": 9},
        checkpoint={"best": "eval/accuracy"},
    )
    assert main(["train", str(path)]) == 0
    steps = read_steps(tmp_path / "run")
    assert len(steps) == 4  # the first is the best, and then three
    assert "stopped by evaluation.early_stop" in capsys.readouterr().out
    best = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    accuracies = [step["eval/accuracy"] for step in steps]
    assert (best["metric"], best["value"]) == ("eval/accuracy", max(accuracies))
    assert best["step"] == accuracies.index(max(accuracies)) + 1
    assert main(["eval", str(tmp_path / "run"), "--best", "--allow-code", "own_metrics"]) == 0
    assert f"step_{best['step']:08d}" in capsys.readouterr().out
    assert main(["train", str(path), "--checkpoint.best", "eval/nothing"]) == 2
    assert "eval/accuracy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "key"), [({"checkpoint": {"best": "eval/raises"}}, "checkpoint.best"), ({}, "evaluation.early_stop")]
)
def test_first_evaluation_without_a_required_metric_raises(
    section: dict[str, Any], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation: dict[str, Any] = {"samples": 3, "max_tokens": 2, "metrics": ["own_metrics:raises"]}
    if not section:
        evaluation["early_stop"] = {"metric": "eval/raises"}
    assert main(["train", str(config(tmp_path, evaluation=evaluation, **section))]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {key}")
    assert "step 2 did not compute eval/raises" in err
    assert "eval/questions/loss" in err  # the metrics that it computed
    assert err.count("\n") == 1
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()  # no step is lost


@pytest.mark.long
def test_generated_media_are_in_run_folder_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A composed model whose every answer begins with an item of its own."""
    monkeypatch.syspath_prepend(str(SENSOR))
    make_tokenizer(tmp_path / "tokenizer", CHATML)
    item = {"type": "series", "series": [0.0, 0.5, 1.0, 0.5]}
    turns = [{"role": "user", "content": [item]}, {"role": "assistant", "content": [item]}]
    rows = write_rows(tmp_path / "waves.jsonl", [{"messages": turns}] * 8)
    data = {"sources": [{"path": str(rows)}], "eval_sources": [{"path": str(rows)}]}
    path = write_omni_config(
        tmp_path,
        "llama",
        model={"modalities": {"series": MODALITIES["series"]}},
        data=data,
        train={"steps": 30, "packs_per_step": 2, "lr": 1e-2, "warmup_steps": 0},
        evaluation={"every": 30, "samples": 1, "max_tokens": 4},
    )
    assert main(["train", str(path)]) == 0
    (record,) = records(tmp_path / "run")
    assert record["question"] == "user: [series]"
    (made,) = record["items"]
    assert made["modality"] == "series"
    assert (tmp_path / "run" / made["file"]).is_file()
    assert made["file"] in (tmp_path / "run" / "report.html").read_text()


def test_eval_without_checkpoint_uses_initial_weights_and_needs_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, evaluation={"every": 0})
    assert main(["eval", str(path)]) == 0
    assert "initial weights: " in capsys.readouterr().out
    assert main(["eval", str(path), "--data.eval_sources", "[]"]) == 2
    assert "data.eval_sources: not set" in capsys.readouterr().err
    assert main(["eval", str(tmp_path)]) == 2
    assert "config.yaml not found" in capsys.readouterr().err


def test_model_copy_that_exceeds_memory_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("omnizoo.training.evaluation.responses.total_memory", lambda device: 100_000)
    assert main(["train", str(config(tmp_path, evaluation={"samples": 1}))]) == 2
    assert "evaluation.samples: a full copy of the model" in capsys.readouterr().err


def test_docs_example_trains_evaluates_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root / "examples" / "right_sum"))
    short = ["--train.steps", "2", "--evaluation.every", "2", "--evaluation.samples", "2", "--data.pack_tokens", "128"]
    run = tmp_path / "sums"
    assert main(["train", "examples/right_sum/sums.yaml", *short, "--log.dir", str(run)]) == 0
    assert main(["eval", str(run), "--allow-code", "right_sum"]) == 0
    written = json.loads((run / "eval" / "step_00000002" / "metrics.json").read_text())
    last = read_steps(run)[-1]
    names = ("eval/loss", "eval/held_out/loss", "eval/stories/accuracy", "eval/right_sum", "eval/exact_match")
    assert {name: written[name] for name in names} == {name: last[name] for name in names}
    asked = ["--messages", str(run / "questions.jsonl"), "--out", str(run / "answers.jsonl"), "--max-tokens", "4"]
    write_rows(run / "questions.jsonl", [chat("What is 2 plus 2?", "4"), chat("What is 3 plus 2?", "5")])
    assert main(["generate", str(run), *asked, "--temperature", "0"]) == 0
    assert [json.loads(line)["expected"] for line in (run / "answers.jsonl").read_text().splitlines()] == ["4", "5"]


def test_report_escapes_responses(tmp_path: Path) -> None:
    files = ["javascript:alert(1)", "/etc/passwd", "../up.png", 'a".png', "page.html", "samples/step_00000002/0/0.png"]
    record = {"step": 2, "question": "<script>", "answer": "<b>", "items": [{"file": file} for file in files]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(record) + "\nnot JSON\n")
    page = write_report(RunFolder(tmp_path)).read_text()
    assert "&lt;script&gt;" in page
    assert 'href="./javascript%3Aalert%281%29"' in page
    assert 'src="./samples/step_00000002/0/0.png"' in page
    assert page.count("<img") == 2  # the last one, and the one with a quote in its name
    assert "/etc/passwd" not in page.replace("<p>/etc/passwd</p>", "")
