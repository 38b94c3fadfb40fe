"""Entry point of the `omnizoo` command: run a command and turn errors into exit codes.

A `UserError` is printed as one line on stderr, with exit code 2.
"""

import sys
from collections.abc import Sequence

from omnizoo.cli.parser import parse
from omnizoo.config.errors import TrainingError, UserError, first_line, is_out_of_memory
from omnizoo.config.versions import explain_import
from omnizoo.launch.output import CLOSED_PIPE, OutputError, prepare_streams
from omnizoo.launch.stderr import report_error
from omnizoo.launch.system_limits import check_arguments, explain_limit, raise_open_files


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program name; `sys.argv[1:]` if None.

    Returns:
        0 for success, 1 for a failed run, 2 for a user error, 130 after Ctrl-C outside the training loop, 141 if the
        program that reads the output has closed the pipe (as `head` does in `omnizoo recipes | head`).
    """
    prepare_streams()
    raise_open_files()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OutputError as error:
        if error.is_closed:
            return CLOSED_PIPE
        report_error(str(error))
        return 1


def _run(argv: list[str]) -> int:
    """Run one command and return its exit code. User errors and known system errors are printed as one line."""
    try:
        problem = check_arguments(argv)
        if problem is not None:
            raise UserError(problem)
        args = parse(argv)
        return int(args.run(args))
    except UserError as error:
        report_error(str(error))
        return 2
    except TrainingError as error:
        report_error(str(error))
        return 1
    except ImportError as error:
        line = explain_limit(error) or explain_import(error)
        if line is None:
            raise
        report_error(line)
        return 2
    except (MemoryError, RuntimeError, OSError, UnicodeEncodeError) as error:
        line = explain_limit(error)
        if line is None and is_out_of_memory(error):
            line = f"out of memory: {first_line(error)}"
        if line is None:
            raise
        report_error(line)
        return 1
    except KeyboardInterrupt:
        return 130
