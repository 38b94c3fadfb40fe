"""The two ways a run ends early with one clear line instead of a traceback."""


class UserError(ValueError):
    """A mistake the user can fix: names file, key and value, what was expected and what to do. Exit code 2."""


class TrainingError(RuntimeError):
    """The run cannot go on, through no mistake in the config (non-finite losses, a full disk). Exit code 1."""
