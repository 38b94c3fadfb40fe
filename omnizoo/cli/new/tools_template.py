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
    """Return a fix that sets a chat template if the row needs one that the tokenizer lacks; otherwise no fixes."""
    from omnizoo.data.rendering.template_analysis import read_template
    from omnizoo.data.rendering.template_sandbox import REASONING

    template = tokenizer.chat_template
    if isinstance(template, dict):  # templates by purpose; the one for tools is used for rows with tools
        template = "\n".join(template.values())
    needs = _needs(row)
    problem = "the tokenizer has no chat template"
    if template:
        facts = read_template(template)
        reads_reasoning = facts.fields is None or not facts.fields.isdisjoint(REASONING)
        has = {"chats": True, "tools": "tools" in facts.variables, "reasoning": reads_reasoning}
        needs = {name for name in needs if not has[name]}
        problem = "the model's chat template does not use them"
    if not needs:
        return []
    return [Fix(TEMPLATE_KEY, str(template_file), f"the rows have {' and '.join(sorted(needs))}, but {problem}")]


def _needs(row: Mapping[str, Any]) -> set[str]:
    """Return what a chat template must render for a row: `chats`, `tools`, `reasoning`."""
    from omnizoo.data.rendering.template_sandbox import REASONING
    from omnizoo.data.rows.messages import CALL_PART, CALLS, REASONING_PARTS, SPEAKERS

    chats = [row[name] for name in CHATS if isinstance(row.get(name), list)]
    messages = [message for chat in chats for message in chat if isinstance(message, Mapping)]
    needs = {"chats"} if messages else set()
    if row.get("tools"):
        needs.add("tools")
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
