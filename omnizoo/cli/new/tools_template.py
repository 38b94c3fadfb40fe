"""Offer a chat template for rows whose tools, tool calls or reasoning the model's own template does not render."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.data.row import Fix

TEMPLATE_KEY = "data.chat_template"
CHATS = ("messages", "conversations", "chosen", "chosen_messages", "rejected", "rejected_messages")
BEGIN, END = "<|im_start|>", "<|im_end|>"  # marks of turns in ChatML


def template_fixes(tokenizer: Any, row: Mapping[str, Any], template_file: Path) -> list[Fix]:
    """Return a fix that sets a chat template for a bad row that needs one; no fixes for other rows.

    A bad row needs one if the tokenizer has no chat template, or one that does not use tools or reasoning of the row.
    """
    from omnizoo.data.rendering.template_analysis import read_template
    from omnizoo.data.rendering.template_sandbox import REASONING

    template = tokenizer.chat_template
    if isinstance(template, dict):  # templates by purpose; the one for tools is used for rows with tools
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
    """Return what a chat template must render for a row: `tools`, `reasoning`."""
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
    """Write a chat template with tools and reasoning.

    Turns are marked as in ChatML if the tokenizer has its special tokens, and otherwise end with its end-of-sequence
    token.
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
