"""Check that every field of a row is used. An unused field makes a bad row, unless it is known to be harmless.

Otherwise a run could silently train without an image, without a system prompt, or on a response that was rejected.
Therefore no field is dropped silently.
"""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from omnizoo.config.sections.loss_options import PREFERENCES
from omnizoo.data.row import CONVERSATION, PROMPTS, SIDES, SINGLE, BadRow, Row
from omnizoo.modalities.media import WELL_KNOWN

# Metadata that other tools store in rows: ids, origin, topic, statistics. docs/how-to/data.md lists these names.
# fmt: off
HARMLESS = frozenset(
    {
        "id", "_id", "uid", "uuid", "guid", "key", "idx", "index", "hash", "md5", "sha256", "row_id", "sample_id",
        "example_id", "doc_id", "document_id", "conversation_id", "conv_id", "dialog_id", "dialogue_id",
        "session_id", "turn_id", "prompt_id", "question_id", "message_id",
        "source", "source_id", "source_dataset", "data_source", "origin", "dataset", "dataset_name", "dataset_id",
        "subset", "split", "shard",
        "meta", "metadata", "__key__", "__url__", "__local_path__", "url", "uri", "file_name", "filename",
        "file_path",
        "task", "task_name", "task_type", "category", "domain", "topic", "subject", "difficulty", "language",
        "lang", "language_score",
        "license", "licence", "author", "date", "time", "timestamp", "created", "created_at", "created_utc",
        "added", "updated_at", "dump", "crawl",
        "num_tokens", "token_count", "n_tokens", "num_turns", "turns", "word_count", "quality_score",
        "width", "height", "original_width", "original_height", "status", "error_message", "exif",
    }
)
# fmt: on
# In messages, also the id that connects the result of a tool with its call.
HARMLESS_IN_MESSAGE = HARMLESS | {"tool_call_id"}
EMPTY = (str, list, dict, bytes, tuple)  # types whose empty values count as absent

Pairs = Literal["refused", "allowed", "required"]  # whether the losses of the run use preference pairs

PAIRS = f"it is one of a preference pair, which is not trained on without {', '.join(PREFERENCES)} in train.losses"
READ_PAIRS = "preference pairs are read from `chosen` and `rejected`"
WEIGHTS = "weights of the loss are read from `weight`, of a message or of the row; this is not supported yet"
TOKENS = "rows that are tokenised already are not supported yet"
COLUMNS = (
    "prompts and answers are read from `instruction` and `output`, `prompt` and `completion`, or `query` and `response`"
)
FEEDBACK = "scores of answers are not trained on yet"
LABELS = "labels of answers are not trained on without kto in train.losses, which reads `label` next to `completion`"
# Fields with a known meaning that is not used in training: reason, and name patterns.
# fmt: off
MEANT = {
    PAIRS: (
        "chosen", "chosen_*", "rejected", "rejected_*", "*_chosen", "*_rejected", "preferred", "dispreferred",
    ),
    FEEDBACK: ("reward", "rewards", "score", "scores", "margin"),
    LABELS: ("label", "kto_tag"),
    WEIGHTS: ("weights", "*_weight", "loss_scale", "loss_mask"),
    TOKENS: ("input_ids", "token_ids", "tokens", "labels", "attention_mask", "position_ids"),
    COLUMNS: (
        "instruction", "input", "output", "prompt", "completion", "response", "query", "question", "answer",
        "history", "inputs", "targets", "context",
    ),
}
# fmt: on


def says_nothing(value: Any) -> bool:
    """Whether a value is None or empty. Columnar files give every row the union of all keys, so it counts as absent."""
    if value is None:
        return True
    if not isinstance(value, EMPTY):
        return False
    return not value or (isinstance(value, dict) and all(part is None for part in value.values()))


class RowFields:
    """Checks which fields of a row are used.

    Args:
        modalities: Names of the modalities of the model.
        ignore: Names and glob patterns of fields to ignore (`data.ignore`).
        pairs: Whether preference pairs are refused, allowed or required.
        singles: Whether labeled responses (`completion` and `label`) are accepted as well.
    """

    def __init__(self, modalities: Collection[str], ignore: Sequence[str], pairs: Pairs, singles: bool) -> None:
        self.modalities, self.pairs, self.singles = sorted(modalities), pairs, singles
        self.names = frozenset(ignore)
        self.media = {column for name in modalities for column in (name, f"{name}s")}

    def ignores(self, name: str) -> bool:
        """Whether `data.ignore` contains the name, or a pattern that matches it."""
        return name in self.names or any(fnmatchcase(name, pattern) for pattern in self.names)

    def given(self, row: Row) -> Row:
        """Return the fields that are neither empty nor named in `data.ignore`.

        Patterns of `data.ignore` do not remove fields here: they only apply to unused fields.
        """
        there = {name: value for name, value in row.items() if not says_nothing(value) and name not in self.names}
        if not any(name in there for name in CONVERSATION):  # keep an empty conversation: it has its own error message
            there |= {name: row[name] for name in CONVERSATION if row.get(name) is not None and name not in self.names}
        return there

    def has_preference(self, given: Row) -> bool:
        """Whether the row is read as a preference pair or labeled response.

        Raises:
            BadRow: If it is one, and has a field that is not used.
        """
        if self.pairs == "refused":
            return False
        forms = (SIDES, SINGLE) if self.singles else (SIDES,)
        form = next((form for form in forms if any(name in given for name in form)), None)
        if form is None:
            return False
        self.check_read(given, {*form, *PROMPTS, *self.media, "system", "tools"})
        return True

    def check_conversation(self, given: Row, row: Row, way_out: str = "") -> None:
        """Check that a row without preferences has exactly one conversation or text, and no unused fields.

        Args:
            given: The fields that are neither empty nor ignored.
            row: The whole row, for error messages.
            way_out: Suggestion for a row without a conversation.

        Raises:
            BadRow: If the row cannot be used.
        """
        if self.pairs == "required":
            single = " and no single answer (`completion`, `label`)" if self.singles else ""
            raise BadRow(
                f"it is no preference pair (`chosen`, `rejected`){single}, and the losses of the run read nothing else"
            )
        conversations = [name for name in CONVERSATION if name in given]
        if len(conversations) > 1:
            both = " and ".join(f"`{name}`" for name in conversations)
            raise BadRow(f"it has {both}, and only one is read; name the others in data.ignore")
        for name in self.modalities:
            if name in given and f"{name}s" in given:
                raise BadRow(f"it has `{name}` and `{name}s`, and only one is read; name the other in data.ignore")
        if conversations or any(meaning(name) == PAIRS and not self.ignores(name) for name in given):
            read = {*conversations, *self.media, "weight"}
            self.check_read(given, read if conversations == ["text"] else read | {"system", "tools"})
        if not conversations:
            needed = "`messages`, `conversations` or `text`"
            why = way_out or next((why for name in given if (why := meaning(name)) is not None), "")
            has = ", ".join(map(repr, row)) or "nothing"
            raise BadRow(f"a row needs {needed}; this one has {has}{f' ({why})' if why else ''}")

    def check_read(self, names: Iterable[str], read: Collection[str], of: str = "") -> None:
        """Check that each field is used, harmless or ignored.

        Args:
            names: Names of the fields.
            read: Names of fields that are used.
            of: Location of the fields for the error message, such as " of message 2".

        Raises:
            BadRow: If a field is not used.
        """
        unread = [name for name in names if name not in read and name not in HARMLESS and not self.ignores(name)]
        if unread:
            raise BadRow(self.unread(unread, of))

    def unread(self, names: Sequence[str], of: str) -> str:
        """Return an error message: why these fields are not used, and what to do."""
        listed = ", ".join(f"`{name}`" for name in names)
        reasons = [why for name in names if (why := meaning(name)) is not None]
        why = PAIRS if PAIRS in reasons else next(iter(reasons), None)
        why = READ_PAIRS if why == PAIRS and self.pairs != "refused" else why
        if why is None and any(name.removesuffix("s") in WELL_KNOWN for name in names):
            why = f"of media, this model reads {', '.join(self.modalities) or 'none'}"
        return f"nothing reads {listed}{of}{f': {why}' if why else ''} (data.ignore leaves out fields by name)"


def meaning(name: str) -> str | None:
    """Return why a field with a known meaning is not used in training; None for other fields."""
    for why, patterns in MEANT.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return why
    return None
