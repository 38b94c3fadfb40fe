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
TAKE_OVERRIDES = ("train", "plan", "verify", "data")  # commands with `--section.key value`


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse(list(sys.argv[1:] if argv is None else argv))
        return int(args.run(args))
    except (UserError, TrainingError) as error:
        from omnizoo.cli.stderr import report_error

        report_error(str(error))
        return 2 if isinstance(error, UserError) else 1
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

    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder", allow_abbrev=False)
    export.add_argument("checkpoint", metavar="CHECKPOINT", type=path_argument, help="checkpoint folder of a run")
    export.add_argument("out", metavar="OUT_DIR", type=path_argument, help="new folder, for `from_pretrained` to load")
    export.add_argument("--ema", action="store_true", help="the moving average of the weights (optimizer.ema)")
    export.add_argument("--best", action="store_true", help="of a run folder: the best checkpoint (`checkpoint.best`)")
    export.add_argument("--merge", action="store_true", help="of a run with an adapter: the whole model, merged")
    export.set_defaults(run=_export)
    allow_code(export)

    generate = commands.add_parser(
        "generate", help="what a model answers: text, and whatever it produces", allow_abbrev=False
    )
    generate.add_argument(
        "model", metavar="MODEL_DIR", type=path_argument, help="Hugging Face folder, as `export` writes it"
    )
    generate.add_argument(
        "--messages", metavar="FILE", type=path_argument, help="JSON: a list of messages, media included"
    )
    generate.add_argument("--prompt", metavar="TEXT", help="one message of the user")
    generate.add_argument(
        "--out", metavar="DIR", type=path_argument, default=Path("generated"), help="where produced items go"
    )
    generate.add_argument("--max-tokens", metavar="N", type=int, default=256, help="most tokens of text (default: 256)")
    generate.add_argument("--temperature", metavar="T", type=float, default=1.0, help="0: always the likeliest")
    generate.add_argument("--top-k", metavar="K", type=int, default=0, help="draw from the K likeliest only; 0: all")
    generate.add_argument("--top-p", metavar="P", type=float, default=1.0, help="draw from the likeliest P of the mass")
    generate.add_argument("--seed", metavar="N", type=int, default=0, help="same seed, same output")
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

        keys = sorted((key.key for key in reference.keys()), key=lambda key: key.count("."))  # noqa: SIM118 - no dict
        flags |= {f"--{key.rpartition('.')[2]}": f"--{key}" for key in reversed(keys)}
    close = get_close_matches(argument.partition("=")[0].replace("-", "_").replace("__", "--", 1), flags, n=1)
    return f"did you mean {flags[close[0]]}?" if close else f"see `{parser.prog} --help`"


def _train(args: argparse.Namespace) -> int:
    from omnizoo.cli.train import train

    return train(args.config, args.overrides, args.nproc)


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


def _recipes(args: argparse.Namespace) -> int:
    from omnizoo.cli.recipes import recipes

    return recipes()


def _export(args: argparse.Namespace) -> int:
    from omnizoo.assembly.adapters import base_weights
    from omnizoo.checkpoint.export import export

    base = base_weights if args.merge else None
    export(args.checkpoint, args.out, None, args.ema, args.allow_code, args.trust_remote_code, args.best, base)
    return 0


def _generate(args: argparse.Namespace) -> int:
    from omnizoo.cli.generate import generate

    sampling = (args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    code = (args.allow_code, args.trust_remote_code)
    return generate(args.model, args.messages, args.prompt, args.out, *sampling, *code)


def _doctor(args: argparse.Namespace) -> int:
    from omnizoo.cli.doctor import doctor

    return doctor(as_json=args.json)
