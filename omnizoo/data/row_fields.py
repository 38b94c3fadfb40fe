"""Which fields of a row are read. What nothing reads is a bad row, by name, unless it is known to be harmless.

A run must not look fine while it trains on something other than the row says: an unread picture, a system prompt that
vanishes, the rejected answer of a pair. So there is no field that is left out without a word.
"""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from omnizoo.config.loss_kinds import PREFERENCES
from omnizoo.data.rows import CONVERSATION, PROMPTS, SIDES, SINGLE, BadRow, Row
from omnizoo.modalities.item import WELL_KNOWN

# What other tools write about a row: who it is, where it comes from, what it is about. docs/data.md lists these.
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
# Besides those, in a message: what ties the result of a tool to its call.
HARMLESS_IN_MESSAGE = HARMLESS | {"tool_call_id"}
EMPTY = (str, list, dict, bytes, tuple)  # of these, an empty one says nothing
REMEMBERED = 4096  # sets of fields; data with more of them is checked anew

Pairs = Literal["refused", "allowed", "required"]  # what becomes of preference pairs, by the losses of the run

PAIRS = f"it is one of a preference pair, which is not trained on without {', '.join(PREFERENCES)} in train.losses"
READ_PAIRS = "preference pairs are read from `chosen` and `rejected`"
WEIGHTS = "weights of the loss are read from `weight`, of a message or of the row; this is not supported yet"
TOKENS = "rows that are tokenised already are not supported yet"
COLUMNS = (
    "prompts and answers are read from `instruction` and `output`, `prompt` and `completion`, or `query` and `response`"
)
FEEDBACK = "scores of answers are not trained on yet"
LABELS = "labels of answers are not trained on without kto in train.losses, which reads `label` next to `completion`"
# Fields that mean something, and are refused by name.
MEANT = {
    **dict.fromkeys(
        ("chosen", "chosen_*", "rejected", "rejected_*", "*_chosen", "*_rejected", "preferred", "dispreferred"), PAIRS
    ),
    **dict.fromkeys(("reward", "rewards", "score", "scores", "margin"), FEEDBACK),
    **dict.fromkeys(("label", "kto_tag"), LABELS),
    **dict.fromkeys(("weights", "*_weight", "loss_scale", "loss_mask"), WEIGHTS),
    **dict.fromkeys(("input_ids", "token_ids", "tokens", "labels", "attention_mask", "position_ids"), TOKENS),
    **dict.fromkeys(
        (
            *("instruction", "input", "output", "prompt", "completion", "response", "query", "question", "answer"),
            *("history", "inputs", "targets", "context"),
        ),
        COLUMNS,
    ),
}


def says_nothing(value: Any) -> bool:
    """Columnar files give every row every key; what is None, or empty, was not there."""
    if value is None:
        return True
    if not isinstance(value, EMPTY):
        return False
    return not value or (isinstance(value, dict) and all(part is None for part in value.values()))


class Fields:
    """What is read of a row by a model with these modalities; `ignore` (data.ignore) are names and glob patterns.
    `singles`: answers may also come one by one, each with a label."""

    def __init__(
        self,
        modalities: Collection[str] = (),
        ignore: Sequence[str] = (),
        pairs: Pairs = "refused",
        singles: bool = False,
    ) -> None:
        self.modalities, self.pairs, self.singles = sorted(modalities), pairs, singles
        self.names = frozenset(ignore)
        self.patterns = [pattern for pattern in ignore if any(sign in pattern for sign in "*?[")]
        self.media = {column for name in modalities for column in (name, f"{name}s")}
        self.verdicts: dict[tuple[str, ...], tuple[str, str]] = {}  # by fields: the conversation's, what is wrong

    def ignores(self, name: str) -> bool:
        return name in self.names or any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def given(self, row: Row) -> Row:
        """What the row says: fields that are not empty, not named in data.ignore (patterns hide only the unread)."""
        there = {name: value for name, value in row.items() if not says_nothing(value) and name not in self.names}
        if not any(name in there for name in CONVERSATION):  # an empty conversation is worth its own message
            there |= {name: row[name] for name in CONVERSATION if row.get(name) is not None and name not in self.names}
        return there

    def has_preference(self, given: Row) -> bool:
        """Whether the row is to be read as a preference, a pair or a single answer; whatever nothing reads of one is a
        bad row."""
        if self.pairs == "refused":
            return False
        forms = (SIDES, SINGLE) if self.singles else (SIDES,)
        form = next((form for form in forms if any(name in given for name in form)), None)
        if form is None:
            return False
        read = {*form, *PROMPTS, *self.media, "system", "tools"}
        if unread := [name for name in given if name not in read and name not in HARMLESS and not self.ignores(name)]:
            raise BadRow(self.unread(unread))
        return True

    def conversation(self, given: Row, row: Row, way_out: str = "") -> str:
        """The field that is the text or chat of the row; whatever else nothing reads is a bad row."""
        if self.pairs == "required":
            single = " and no single answer (`completion`, `label`)" if self.singles else ""
            raise BadRow(
                f"it is no preference pair (`chosen`, `rejected`){single}, and the losses of the run read nothing else"
            )
        key = tuple(given)
        verdict = self.verdicts.get(key)
        if verdict is None:
            if len(self.verdicts) >= REMEMBERED:
                self.verdicts.clear()
            verdict = self.verdicts[key] = self._judge(key)
        field, wrong = verdict
        if wrong:
            raise BadRow(wrong)
        if not field:
            needed = "`messages`, `conversations` or `text`"
            why = way_out or next((why for name in given if (why := meaning(name)) is not None), "")
            has = ", ".join(map(repr, row)) or "nothing"
            raise BadRow(f"a row needs {needed}; this one has {has}{f' ({why})' if why else ''}")
        return field

    def _judge(self, names: tuple[str, ...]) -> tuple[str, str]:
        found = [name for name in CONVERSATION if name in names]
        if len(found) > 1:
            both = " and ".join(f"`{name}`" for name in found)
            return "", f"it has {both}, and only one is read; name the others in data.ignore"
        doubled = [name for name in self.modalities if name in names and f"{name}s" in names]
        if doubled:
            return "", f"it has `{doubled[0]}` and `{doubled[0]}s`, and only one is read; name the other in data.ignore"
        field = found[0] if found else ""
        read = {*found, *self.media, "weight"} | ({"system", "tools"} if field != "text" else set())
        unread = [name for name in names if name not in read and name not in HARMLESS and not self.ignores(name)]
        if not field and not any(meaning(name) == PAIRS for name in unread):
            return "", ""  # what is missing is said instead
        return field, self.unread(unread) if unread else ""

    def unread(self, names: Sequence[str], of: str = "") -> str:
        """Why nothing reads these fields, and what to do."""
        listed = ", ".join(f"`{name}`" for name in names)
        reasons = [why for name in names if (why := meaning(name)) is not None]
        why = PAIRS if PAIRS in reasons else next(iter(reasons), None)
        why = READ_PAIRS if why == PAIRS and self.pairs != "refused" else why
        if why is None and any(name.removesuffix("s") in WELL_KNOWN for name in names):
            why = f"of media, this model reads {', '.join(self.modalities) or 'none'}"
        return f"nothing reads {listed}{of}{f': {why}' if why else ''} (data.ignore leaves out fields by name)"


def meaning(name: str) -> str | None:
    """What a field is known to stand for, where that is not trained on."""
    return MEANT.get(name) or next((why for pattern, why in MEANT.items() if fnmatchcase(name, pattern)), None)


def of_part(part: Mapping[str, Any], read: Collection[str], fields: Fields) -> list[str]:
    """Keys of a content part that nothing reads."""
    return [name for name in part if name not in read and name not in HARMLESS and not fields.ignores(name)]
