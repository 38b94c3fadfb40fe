"""The `omnizoo` command: arguments in, exit code out. A user's mistake is one line on stderr and exit code 2.

Commands import what they need when they run: `omnizoo --help` and config errors must not wait for torch.
"""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from omnizoo.config.errors import TrainingError, UserError, is_out_of_memory

LONGEST_PATH = 4096
TAKE_OVERRIDES = ("train", "eval", "plan", "verify", "data", "launch")  # commands with `--section.key value`


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse(list(sys.argv[1:] if argv is None else argv))
        return int(args.run(args))
    except (UserError, TrainingError) as error:
        from omnizoo.cli.stderr import report_error

        report_error(str(error))
        return 2 if isinstance(error, UserError) else 1
    except ImportError as error:
        from omnizoo.cli.stderr import report_error
        from omnizoo.config.versions import explain_import

        if (line := explain_import(error)) is None:
            raise
        report_error(line)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        from omnizoo.cli.stderr import report_error

        report_error(f"out of memory: {(str(error).splitlines() or ['no size is known'])[0]}")
        return 1
    except KeyboardInterrupt:  # outside of the training loop, which ends gracefully by itself
        return 130


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


class TrainHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from omnizoo.cli.train import print_help

        print_help()
        parser.exit()


def path_argument(text: str) -> Path:
    """A path that a system call takes; argparse names the argument in its message."""
    if not text or "\0" in text or len(text) > LONGEST_PATH:
        raise argparse.ArgumentTypeError("expected the name of a file or folder")
    return Path(text)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="omnizoo", description="Train omni-modal models, from one CPU core to a cluster of GPUs.")
    parser.add_argument("--version", action="version", version=f"omnizoo {version('omnizoo')}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)

    train = commands.add_parser("train", help="train by a YAML config", add_help=False, allow_abbrev=False)
    train.add_argument("-h", "--help", action=TrainHelp, nargs=0)
    train.add_argument("config", metavar="CONFIG")
    train.add_argument("--nproc", metavar="N", type=int)
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", help="losses, metrics and answers on held-out data", allow_abbrev=False)
    evaluate.add_argument("config", metavar="CONFIG|RUN", type=path_argument, help="a YAML file, or a run folder")
    evaluate.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=path_argument,
        help="a checkpoint or a run (default: the newest of the run; without one, the initial weights)",
    )
    evaluate.add_argument("--best", action="store_true", help="the best checkpoint of the run (`checkpoint.best`)")
    evaluate.add_argument(
        "--out", metavar="DIR", type=path_argument, help="where files go (default: eval/step_N in the run folder)"
    )
    evaluate.add_argument("--nproc", metavar="N", type=int, help="processes to start on this machine")
    evaluate.set_defaults(run=_eval)
    allow_code(evaluate)

    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder", allow_abbrev=False)
    export.add_argument("checkpoint", metavar="CHECKPOINT", type=path_argument, help="checkpoint folder of a run")
    export.add_argument("out", metavar="OUT_DIR", type=path_argument, help="new folder, for `from_pretrained` to load")
    export.add_argument("--ema", action="store_true", help="the moving average of the weights (optimizer.ema)")
    export.add_argument("--best", action="store_true", help="of a run folder: the best checkpoint (`checkpoint.best`)")
    export.add_argument("--merge", action="store_true", help="of a run with an adapter: the whole model, merged")
    export.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="precision of the weights (default: that of the model it was trained from, or of the run)",
    )
    export.set_defaults(run=_export)
    allow_code(export)

    generate = commands.add_parser(
        "generate", help="what a model answers: text, and whatever it produces", allow_abbrev=False
    )
    generate.add_argument(
        "model",
        metavar="MODEL_DIR",
        type=path_argument,
        help="Hugging Face folder, as `export` writes it; or a run or checkpoint, which is exported for this",
    )
    generate.add_argument(
        "--messages",
        metavar="FILE",
        type=path_argument,
        help="JSON: a list of messages, media included; JSONL: many rows with `messages`",
    )
    generate.add_argument(
        "--prompt", metavar="TEXT", action="append", default=[], help="one message of the user; may be repeated"
    )
    generate.add_argument(
        "--out",
        metavar="DIR|FILE.jsonl",
        type=path_argument,
        default=Path("generated"),
        help="where produced items go; or a JSONL file for all answers, and items beside it",
    )
    generate.add_argument("--max-tokens", metavar="N", type=int, default=256, help="most tokens of text (default: 256)")
    generate.add_argument("--temperature", metavar="T", type=float, default=1.0, help="0: always the likeliest")
    generate.add_argument("--top-k", metavar="K", type=int, default=0, help="draw from the K likeliest only; 0: all")
    generate.add_argument("--top-p", metavar="P", type=float, default=1.0, help="draw from the likeliest P of the mass")
    generate.add_argument("--seed", metavar="N", type=int, default=0, help="same seed, same output")
    generate.add_argument("--speaker", metavar="NAME", help="whose voice it is, of a model that speaks")
    generate.add_argument("--no-speech", action="store_true", help="text only, of a model that speaks")
    generate.set_defaults(run=_generate)
    allow_code(generate)

    doctor = commands.add_parser("doctor", help="what this machine can do, and what it lacks", allow_abbrev=False)
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    doctor.set_defaults(run=_doctor)

    plan = commands.add_parser("plan", help="will it fit: the real step, without a device", allow_abbrev=False)
    plan.add_argument("config", metavar="CONFIG")
    plan.add_argument("--world", metavar="N", type=int, default=8, help="ranks to plan for (default: 8)")
    plan.add_argument(
        "--device", default="h100", help="a100, h100, h200, b200, mi300x, or a YAML file of your own (default: h100)"
    )
    plan.add_argument("--rank", metavar="R", type=int, default=0, help="the rank to look at (default: 0)")
    plan.add_argument(
        "--imbalance",
        metavar="F",
        type=float,
        default=1.0,
        help="rows at this rank's experts / the mean (default: 1)",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    plan.add_argument("--html", metavar="OUT", type=path_argument, help="write memory over the step as a page, too")
    plan.set_defaults(run=_plan)

    verify = commands.add_parser("verify", help="prove that layouts compute what one process does", allow_abbrev=False)
    verify.add_argument("config", metavar="CONFIG")
    verify.add_argument("--world", metavar="N", type=int, default=4, help="ranks to try layouts of (default: 4)")
    verify.add_argument("--layouts", default="all", help="`all`, `few`, or a list such as dp2.uly2,ring4,rep2.dp2.ep2")
    verify.add_argument(
        "--precision",
        choices=("fp32", "fp64", "bf16"),
        default="fp32",
        help="fp64 leaves no room for rounding; bf16 is compared with fp32, by the error of one process in bf16",
    )
    verify.add_argument(
        "--device",
        metavar="KIND",
        default="cpu",
        help="where ranks run: cpu (the default), or the accelerator of this machine (cuda, ...), one for each rank",
    )
    verify.add_argument(
        "--families",
        help="in place of the config's own model: a list of transformers' model types, `all` of the zoo, or `many`",
    )
    verify.add_argument("--markdown", metavar="FILE", type=Path, help="write what was found as a table, too")
    verify.set_defaults(run=_verify)

    data = commands.add_parser("data", help="samples as the model sees them, their lengths and mix", allow_abbrev=False)
    data.add_argument("action", metavar="inspect", choices=("inspect",), help="what to do with the data of a config")
    data.add_argument("config", metavar="CONFIG")
    data.add_argument("--samples", metavar="N", type=int, default=5, help="samples to show (default: 5)")
    data.add_argument(
        "--out", metavar="FILE", type=path_argument, help="write all of it with thumbnails as one HTML page, too"
    )
    data.set_defaults(run=_data)

    launch = commands.add_parser(
        "launch", help="print the job file of a cluster's scheduler for a config", allow_abbrev=False
    )
    launch.add_argument("config", metavar="CONFIG")
    kind = launch.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", dest="kind", action="store_const", const="slurm", help="for sbatch")
    kind.add_argument("--kubernetes", dest="kind", action="store_const", const="kubernetes", help="for kubectl apply")
    launch.add_argument("--nodes", metavar="N", type=int, default=1, help="machines (default: 1)")
    launch.add_argument("--nproc", metavar="N", type=int, default=8, help="processes on each, one a GPU (default: 8)")
    launch.add_argument("--cpus", metavar="N", type=int, default=8, help="cores of each process (default: 8)")
    launch.add_argument("--no-gpus", dest="gpus", action="store_false", help="nodes without accelerators")
    launch.add_argument("--time", metavar="H:M:S", default="24:00:00", help="Slurm: time limit (default: 24:00:00)")
    launch.add_argument("--partition", metavar="NAME", help="Slurm: partition")
    launch.add_argument("--account", metavar="NAME", help="Slurm: account")
    launch.add_argument(
        "--image",
        metavar="NAME",
        default="REGISTRY/omnizoo:latest",
        help="Kubernetes: name of a container that has omnizoo",
    )
    launch.set_defaults(run=_launch)

    new = commands.add_parser(
        "new", help="write a first config for a model and data; or a modality of one's own", allow_abbrev=False
    )
    new.add_argument("what", metavar="MODEL_FOLDER", help="Hugging Face folder; or the word `modality`")
    new.add_argument("of", metavar="DATA", help="file or folder of rows; after `modality`: its name")
    new.add_argument("--nproc", metavar="N", type=int, help="processes that will train here (default: one a device)")
    new.add_argument(
        "--out", metavar="PATH", type=path_argument, help="default: first.yaml; of a modality: this folder"
    )
    new.set_defaults(run=_new)

    report = commands.add_parser("report", help="draw the report of a run anew, or compare runs", allow_abbrev=False)
    report.add_argument("runs", metavar="RUN", nargs="+", type=path_argument, help="run folder (`log.dir`)")
    report.add_argument(
        "--out", metavar="FILE", type=path_argument, help="default: RUN/report.html; of several runs: comparison.html"
    )
    report.set_defaults(run=_report)

    recipes = commands.add_parser(
        "recipes", help="the model families with a recipe, and what is tested", allow_abbrev=False
    )
    recipes.set_defaults(run=_recipes)

    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        close = get_close_matches(argv[0], commands.choices, n=1) or list(commands.choices)
        raise UserError(f"unknown command {argv[0]!r}; did you mean {' or '.join(close)}?")
    # Overrides are taken out first: argparse cannot tell the value of a flag it does not know from a positional.
    overrides, rest = split_overrides(argv) if argv and argv[0] in TAKE_OVERRIDES else ([], argv)
    args, unknown = parser.parse_known_args(rest, argparse.Namespace(overrides=overrides))
    if unknown:
        raise UserError(
            f"unknown argument {unknown[0]!r}; {suggest(unknown[0], commands.choices.get(argv[0], parser))}"
        )
    if not hasattr(args, "run"):
        parser.error(f"expected a command: {', '.join(commands.choices)}")
    return args


def allow_code(parser: argparse.ArgumentParser) -> None:
    """Only the user's own command line may say that code of an artefact is run."""
    parser.add_argument(
        "--allow-code",
        metavar="MODULE",
        action="append",
        default=[],
        help="let the folder name encoders and decoders of this Python module and those below it; may be repeated",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that ships inside the model folder"
    )


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(`--section.key` flags with their values, everything else)."""
    overrides: list[str] = []
    rest: list[str] = []
    takes_value = False
    for arg in argv:
        flag, equals, _ = arg.partition("=")
        is_override = flag.startswith("--") and "." in flag
        (overrides if is_override or (takes_value and not arg.startswith("--")) else rest).append(arg)
        takes_value = is_override and not equals
    return overrides, rest


def suggest(argument: str, parser: argparse.ArgumentParser) -> str:
    """A flag of the command that looks like `argument`, or for `--steps` the full key `--train.steps`."""
    flags = {flag: flag for flag in parser._option_string_actions}
    if parser.prog.split()[-1] in TAKE_OVERRIDES:
        from omnizoo.config import reference
        from omnizoo.config.other_tools import here

        if (said := here(argument.partition("=")[0].removeprefix("--"))) is not None:
            return said
        keys = sorted((key.key for key in reference.keys()), key=lambda key: key.count("."))  # noqa: SIM118 - no dict
        flags |= {f"--{key.rpartition('.')[2]}": f"--{key}" for key in reversed(keys)}
    close = get_close_matches(argument.partition("=")[0].replace("-", "_").replace("__", "--", 1), flags, n=1)
    return f"did you mean {flags[close[0]]}?" if close else f"see `{parser.prog} --help`"


def _train(args: argparse.Namespace) -> int:
    from omnizoo.cli.train import train

    return train(args.config, args.overrides, args.nproc)


def _eval(args: argparse.Namespace) -> int:
    from omnizoo.cli.evaluate import evaluate

    given = (args.checkpoint, args.best, args.out, args.nproc, args.allow_code, args.trust_remote_code)
    return evaluate(args.config, args.overrides, *given)


def _plan(args: argparse.Namespace) -> int:
    from omnizoo.cli.dry_run import plan

    given = (args.world, args.device, args.rank, args.imbalance, args.json, args.html)
    return plan(args.config, args.overrides, *given)


def _verify(args: argparse.Namespace) -> int:
    from omnizoo.cli.verify import verify

    given = (args.world, args.layouts, args.precision, args.device, args.families, args.markdown)
    return verify(args.config, args.overrides, *given)


def _data(args: argparse.Namespace) -> int:
    from omnizoo.cli.data import inspect

    return inspect(args.config, args.overrides, args.samples, args.out)


def _launch(args: argparse.Namespace) -> int:
    from omnizoo.cli.job_script import Job, job_script

    wanted = (args.nodes, args.nproc, args.cpus, args.gpus, args.time, args.partition, args.account, args.image)
    print(job_script(args.kind, args.config, args.overrides, Job(*wanted)), end="")
    return 0


def _new(args: argparse.Namespace) -> int:
    if args.what == "modality":
        from omnizoo.cli.skeleton import new_modality

        for path in new_modality(args.of, args.out or Path()):
            print(f"written: {path}")
        return 0
    from omnizoo.cli.first_config import new_config

    return new_config(args.what, args.of, args.nproc, args.out or Path("first.yaml"))


def _report(args: argparse.Namespace) -> int:
    from omnizoo.cli.report_runs import report

    return report(args.runs, args.out)


def _recipes(args: argparse.Namespace) -> int:
    from omnizoo.cli.recipes import recipes

    return recipes()


def _export(args: argparse.Namespace) -> int:
    import torch

    from omnizoo.assembly.adapters import base_weights
    from omnizoo.checkpoint.export import export

    base = base_weights if args.merge else None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}[args.dtype]
    code = (args.allow_code, args.trust_remote_code)
    for line in export(args.checkpoint, args.out, dtype, args.ema, *code, args.best, base).lines():
        print(line)
    return 0


def _generate(args: argparse.Namespace) -> int:
    from omnizoo.cli.generate import Drawing, generate

    drawing = Drawing(args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    code = (args.allow_code, args.trust_remote_code)
    spoken = (args.speaker, args.no_speech)
    return generate(args.model, args.messages, args.prompt, args.out, drawing, *code, *spoken)


def _doctor(args: argparse.Namespace) -> int:
    from omnizoo.cli.doctor import doctor

    return doctor(as_json=args.json)
