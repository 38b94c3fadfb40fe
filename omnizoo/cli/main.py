"""Entry point of the `omnizoo` command: run a command and turn errors into exit codes.

A `UserError` is printed as one line on stderr, with exit code 2.
"""

import sys
from collections.abc import Sequence

from omnizoo.cli.parser import parse
from omnizoo.config.errors import TrainingError, UserError, first_line, is_out_of_memory
from omnizoo.config.versions import explain_import
from omnizoo.launch.stderr import report_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program name; `sys.argv[1:]` if None.

    Returns:
        0 for success, 1 for a failed run, 2 for a user error, 130 after Ctrl-C outside the training loop.
    """
    try:
        args = parse(list(sys.argv[1:] if argv is None else argv))
        return int(args.run(args))
    except UserError as error:
        report_error(str(error))
        return 2
    except TrainingError as error:
        report_error(str(error))
        return 1
    except ImportError as error:
        line = explain_import(error)
        if line is None:
            raise
        report_error(line)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        report_error(f"out of memory: {first_line(error)}")
        return 1
    except KeyboardInterrupt:
        return 130
