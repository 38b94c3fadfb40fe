"""Check that every field of a row is used.

A row with an unused field is a bad row, unless the field is known metadata or listed in `data.ignore`. If fields were
dropped silently, a run could train without an image or a system prompt, or on a rejected response.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from omnizoo.config.sections.loss_options import PREFERENCES
from omnizoo.data.row import (
    CHAT_PROMPTS,
    CONVERSATION,
    PREFERENCE_ALIASES,
    PROMPTS,
    RESPONSES,
    SIDES,
    SINGLE,
    BadRow,
    Fix,
    Row,
)
from omnizoo.data.rows.tokenized import TOKEN_FIELDS_OF_ROWS
from omnizoo.modalities.media import WELL_KNOWN

# Metadata that other tools store in rows, such as ids, origin, topic and statistics. It may be dropped.
# fmt: off
METADATA_FIELDS = frozenset(
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
# Also metadata, but only in messages: the id that connects a tool result with its call.
MESSAGE_METADATA_FIELDS = METADATA_FIELDS | {"tool_call_id"}
EMPTY = (str, list, dict, bytes, tuple)  # types whose empty values count as absent
REJECTED_RESPONSE = "rejected_response"  # field of ms-swift with a rejected alternative to the last response of the row
LABEL_FIELDS = ("label", "kto_tag")  # fields that state whether the response of the row is desirable

PreferenceRows = Literal["refused", "allowed", "required"]  # how the losses of the run treat preference rows

NEEDS_PREFERENCE_LOSS = f"preference rows need one of {', '.join(PREFERENCES)} in train.losses"
PAIR_FIELDS = "preference pairs are read from `chosen` and `rejected`"
WEIGHT_FIELDS = "loss weights are read from `weight`, in a message or in the row"
PRETOKENIZED = "pre-tokenized rows need `input_ids`"
PROMPT_FIELDS = (
    "prompts and responses are read from `instruction` and `output`, `prompt` and `completion`, or `query` and "
    "`response`"
)
SCORES = "response scores are not supported"
LABELS = "labels need classification in train.losses or, next to a response, kto"
# Names and patterns of fields that have a known meaning but are not used, keyed by the reason why not.
# fmt: off
UNSUPPORTED_FIELDS = {
    NEEDS_PREFERENCE_LOSS: (
        "chosen", "chosen_*", "chosen-*", "rejected", "rejected_*", "rejected-*", "*_chosen", "*_rejected",
        "preferred", "dispreferred",
    ),
    SCORES: ("reward", "rewards", "score", "scores", "margin"),
    LABELS: LABEL_FIELDS,
    WEIGHT_FIELDS: ("weights", "*_weight", "loss_scale", "loss_mask"),
    PRETOKENIZED: ("token_ids", "tokens", *TOKEN_FIELDS_OF_ROWS),
    PROMPT_FIELDS: (
        "instruction", "input", "output", "prompt", "completion", "response", "query", "question", "answer",
        "history", "inputs", "targets", "context",
    ),
}
# fmt: on

# Reasons for which a field is never suggested for `data.ignore`, because dropping the field would change the training.
NEVER_DROPPED = (NEEDS_PREFERENCE_LOSS, WEIGHT_FIELDS, PRETOKENIZED)


def is_empty(value: Any) -> bool:
    """Whether a value is None or empty. Such a field counts as absent, because in columnar files every row has it."""
    if value is None:
        return True
    if not isinstance(value, EMPTY):
        return False
    if isinstance(value, dict):
        return all(part is None for part in value.values())
    return not value


class RowFields:
    """Checks which fields of a row are used.

    Args:
        modalities: Names of the modalities of the model.
        ignore: Names and glob patterns of fields to ignore (`data.ignore`).
        preferences: Whether preference rows are refused, allowed or required.
        labeled_responses: Whether labeled responses (`completion` and `label`) are accepted as preference rows.
        reads_margin: Whether the `margin` of a preference row is used.
    """

    def __init__(
        self,
        modalities: Collection[str],
        ignore: Sequence[str],
        preferences: PreferenceRows,
        labeled_responses: bool,
        reads_margin: bool = False,
    ) -> None:
        self.modalities = sorted(modalities)
        self.preferences = preferences
        self.labeled_responses = labeled_responses
        self.scores = ("margin",) if reads_margin else ()
        self.ignored = frozenset(ignore)
        self.media_columns = {column for name in modalities for column in (name, f"{name}s")}

    def is_ignored(self, name: str) -> bool:
        """Whether `data.ignore` contains the name, or a pattern that matches it."""
        return name in self.ignored or any(fnmatchcase(name, pattern) for pattern in self.ignored)

    def present(self, row: Row) -> Row:
        """Return the fields of a row that are neither empty nor named in `data.ignore`.

        Patterns in `data.ignore` do not remove any fields here, because they only apply to unused fields.
        """
        not_ignored = {name: value for name, value in row.items() if name not in self.ignored}
        present = {name: value for name, value in not_ignored.items() if not is_empty(value)}
        if not any(name in present for name in CONVERSATION):  # an empty conversation has its own error message
            present |= {name: not_ignored[name] for name in CONVERSATION if not_ignored.get(name) is not None}
        return present if self.preferences == "refused" else self._with_preference_names(present)

    def _with_preference_names(self, present: Row) -> Row:
        """Return the row with our names for preference fields instead of the names of other tools."""
        for other_name, name in PREFERENCE_ALIASES.items():
            is_read = name != "label" or self.labeled_responses
            if other_name in present and is_read and name not in present:
                present = {name if key == other_name else key: value for key, value in present.items()}
        return present

    def has_preference(self, present: Row, prompt_fixes: Sequence[Fix] = ()) -> bool:
        """Whether a row is read as a preference pair or as a labeled response.

        Args:
            present: The fields of the row that are neither empty nor ignored.
            prompt_fixes: Changes of `columns` that are needed because the prompt has another name; empty if the row has
                a prompt.

        Raises:
            BadRow: If it is a preference row that lacks a prompt or has an unused field.
        """
        if self.preferences == "refused":
            return False
        if any(name in present for name in SIDES):
            response_fields: tuple[str, ...] = SIDES
        elif REJECTED_RESPONSE in present and "chosen_response" not in present:
            response_fields = (REJECTED_RESPONSE, *RESPONSES)
        elif self.labeled_responses and any(name in present for name in SINGLE):
            response_fields = ("label", *RESPONSES)
        else:
            return False
        if prompt_fixes:
            raise BadRow(f"a preference row needs a prompt{suggestion(prompt_fixes)}", prompt_fixes)
        prompts = {*PROMPTS, *CHAT_PROMPTS}
        self.check_used(present, {*response_fields, *prompts, *self.media_columns, *self.scores, "system", "tools"})
        return True

    def check_conversation(self, present: Row, row: Row, fixes: Sequence[Fix] = ()) -> None:
        """Check that a row without preferences has exactly one conversation or text, and no unused fields.

        Args:
            present: The fields that are neither empty nor ignored.
            row: The whole row, for error messages.
            fixes: Config changes that make a row without a conversation usable.

        Raises:
            BadRow: If the row cannot be used.
        """
        if self.preferences == "required":
            labeled = ", or `completion` and `label`" if self.labeled_responses else ""
            raise BadRow(
                f"not a preference row: all losses in train.losses need `chosen` and `rejected`{labeled}"
                f"{suggestion(fixes) or '. Add cross_entropy to train.losses to train on other rows as well'}.",
                fixes,
            )

        conversations = [name for name in CONVERSATION if name in present]
        if len(conversations) > 1:
            names = " and ".join(f"`{name}`" for name in conversations)
            others = Fix("data.ignore", conversations[1:], f"`{conversations[0]}` is used")
            raise BadRow(f"{names} are present, but only one can be used. Add the others to data.ignore.", [others])
        for name in self.modalities:
            plural = f"{name}s"
            if name in present and plural in present:
                raise BadRow(
                    f"`{name}` and `{plural}` are present, but only one can be used. Add the other to data.ignore."
                )

        if conversations or self._has_unused_preference(present):
            used = {*conversations, *self.media_columns, "weight"}
            if conversations == ["input_ids"]:
                used = {*TOKEN_FIELDS_OF_ROWS, "weight"}
            elif conversations != ["text"]:
                used |= {"system", "tools"}
            self.check_used(present, used)
        if not conversations:
            reason = next(iter(_unsupported_reasons(present)), "")
            details = suggestion(fixes) or (f" ({reason})" if reason else "")
            names = ", ".join(map(repr, row)) or "no fields"
            message = f"`messages`, `conversations` and `text` are missing or empty; the row has {names}{details}"
            raise BadRow(message, fixes)

    def _has_unused_preference(self, present: Row) -> bool:
        """Whether the row has a preference field that is neither used nor ignored."""
        names = [name for name in present if not self.is_ignored(name)]
        return NEEDS_PREFERENCE_LOSS in _unsupported_reasons(names)

    def check_used(self, names: Iterable[str], used: Collection[str], location: str = "") -> None:
        """Check that each field is either used, metadata or ignored.

        Args:
            names: Names of the fields.
            used: Names of the fields that are used.
            location: Location of the fields for the error message, such as "message 2"; empty for the row itself.

        Raises:
            BadRow: If a field is none of these.
        """
        values = names if isinstance(names, Mapping) else dict.fromkeys(names)
        others = [name for name in names if name not in used and name not in METADATA_FIELDS]
        unused = [name for name in others if not self.is_ignored(name)]
        if unused:
            fixes = self._fixes_of_unused(unused, values, location)
            raise BadRow(self.unused_message(unused, location), fixes)

    def _fixes_of_unused(self, unused: Sequence[str], values: Mapping[str, Any], location: str) -> list[Fix]:
        """Return config changes that make a row with unused fields usable.

        They either use the fields (with a preference loss), or drop them if this does not change the training. The
        list is empty if neither is possible.

        Args:
            unused: Names of the unused fields.
            values: All fields.
            location: Location of the fields; empty for the row itself.
        """
        reasons = _unsupported_reasons(unused)
        if not location and self.preferences == "refused":
            if NEEDS_PREFERENCE_LOSS in reasons:
                losses = [{"kind": "dpo", "options": {"beta": 0.1}}]
                return [Fix("train.losses", losses, "the rows are preference pairs; dpo, simpo, orpo or kto")]
            has_label = any(isinstance(values.get(name), bool) for name in LABEL_FIELDS)
            if has_label and any(name in values for name in (*RESPONSES, "messages", "conversations")):
                losses = [{"kind": "kto", "options": {"beta": 0.1}}]
                return [Fix("train.losses", losses, "the rows have labeled responses, which only kto uses")]
        is_media = any(name.removesuffix("s") in WELL_KNOWN for name in unused)
        if is_media or any(reason in NEVER_DROPPED for reason in reasons if reason != NEEDS_PREFERENCE_LOSS):
            return []
        place = f"fields of {location}" if location else "fields"
        return [Fix("data.ignore", list(unused), f"{place} that are not trained on")]

    def unused_message(self, names: Sequence[str], location: str, reason: str = "") -> str:
        """Return an error message for unused fields. It states why they are not used and what to do.

        Args:
            names: Names of the unused fields.
            location: Location of the fields, such as "message 2"; empty for the row itself.
            reason: Why they are not used; empty to find the reason from the names.
        """
        fields = ", ".join(f"`{name}`" for name in names)
        verb, pronoun = ("is", "it") if len(names) == 1 else ("are", "them")
        place = f" of {location}" if location else ""
        reason = reason or self._unused_reason(names)
        because = f": {reason}" if reason else ""
        return f"{fields}{place} {verb} not used{because}. Add {pronoun} to data.ignore to drop {pronoun}."

    def _unused_reason(self, names: Sequence[str]) -> str:
        """Return why fields are not used; empty if unknown. A reason about preferences takes precedence."""
        reasons = _unsupported_reasons(names)
        if NEEDS_PREFERENCE_LOSS in reasons:
            return NEEDS_PREFERENCE_LOSS if self.preferences == "refused" else PAIR_FIELDS
        if reasons:
            return reasons[0]
        if any(name.removesuffix("s") in WELL_KNOWN for name in names):
            return f"this model accepts {', '.join(self.modalities) or 'no media'}"
        return ""


def suggestion(fixes: Sequence[Fix]) -> str:
    """Return the best fix as the end of an error message; "" if there is none, or if only the user knows the value.

    Args:
        fixes: Changes of `columns`, the best one first.
    """
    if not fixes or fixes[0].value is None:
        return ""
    columns = ", ".join(f"{name}: {field}" for name, field in fixes[0].value.items())
    return f". {fixes[0].reason.capitalize()}, set {fixes[0].key}: {{{columns}}}"


def unsupported_reason(name: str) -> str | None:
    """Return why training does not use a field with a known meaning; None for other fields."""
    for reason, patterns in UNSUPPORTED_FIELDS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return reason
    return None


def _unsupported_reasons(names: Iterable[str]) -> list[str]:
    """Return the reasons why training does not use fields with a known meaning, in the order of `names`."""
    reasons = (unsupported_reason(name) for name in names)
    return [reason for reason in reasons if reason is not None]
