"""Write a chat template for rows with tools, tool calls or reasoning that the model's template does not render."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.data.row import Fix

TEMPLATE_KEY = "data.chat_template"
CHATS = ("messages", "conversations", "chosen", "chosen_messages", "rejected", "rejected_messages")
BEGIN, END = "<|im_start|>", "<|im_end|>"  # special tokens at the start and end of a turn in ChatML


def template_fixes(tokenizer: Any, row: Mapping[str, Any], template_file: Path) -> list[Fix]:
    """Return a fix that sets another chat template, if a bad row needs one; otherwise an empty list.

    A row needs another template if the tokenizer has none, or if its template does not use the row's tools or
    reasoning.
    """
    from omnizoo.data.rendering.template_analysis import read_template
    from omnizoo.data.rendering.template_sandbox import REASONING

    template = tokenizer.chat_template
    if isinstance(template, dict):  # named templates; transformers selects one by the tools of a row
        template = "\n".join(template.values())
    if not template:
        return [Fix(TEMPLATE_KEY, str(template_file), "the rows are chats, but the tokenizer has no chat template")]
    facts = read_template(template)
    has_reasoning = facts.fields is None or not facts.fields.isdisjoint(REASONING)
    has = {"tools": "tools" in facts.variables, "reasoning": has_reasoning}
    missing = sorted(name for name in _needs(row) if not has[name])
    if not missing:
        return []
    reason = f"the rows have {' and '.join(missing)}, but the model's chat template does not use them"
    return [Fix(TEMPLATE_KEY, str(template_file), reason)]


def _needs(row: Mapping[str, Any]) -> set[str]:
    """Return the features that a chat template needs for a row: `tools`, `reasoning`, both or neither."""
    from omnizoo.data.rendering.template_sandbox import REASONING
    from omnizoo.data.rows.messages import CALL_PART, CALLS, REASONING_PARTS, SPEAKERS

    chats = [row[name] for name in CHATS if isinstance(row.get(name), list)]
    messages = [message for chat in chats for message in chat if isinstance(message, Mapping)]
    needs = {"tools"} if row.get("tools") else set()
    for message in messages:
        role = message.get("role") or message.get("from")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        kinds = {part.get("type") for part in parts if isinstance(part, Mapping)}
        has_call = role in CALLS or SPEAKERS.get(str(role), role) == "tool" or message.get("tool_calls")
        if has_call or CALL_PART in kinds:
            needs.add("tools")
        if kinds.intersection(REASONING_PARTS) or any(message.get(name) for name in REASONING):
            needs.add("reasoning")
    return needs


def write_template(path: Path, tokenizer: Any) -> None:
    """Write a chat template that renders tools and reasoning.

    If the tokenizer has the special tokens of ChatML, they mark the turns. Otherwise a turn ends with the tokenizer's
    end-of-sequence token.

    Raises:
        UserError: If the file exists or cannot be written.
    """
    if path.exists():
        raise UserError(f"--out: the rows need another chat template, but {path} already exists. Choose another --out.")
    text = (files("omnizoo.cli") / "templates/chat_template.jinja").read_text(encoding="utf-8")
    if not {BEGIN, END} <= tokenizer.get_added_vocab().keys():
        text = text.replace(f'"{BEGIN}"', '"### "').replace(f'"{END}"', "eos_token")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {path}: {error.strerror}") from None
