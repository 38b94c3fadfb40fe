"""Templates run as transformers runs them, except that they may change their own lists, within limits."""

from typing import Any

import pytest
from chat_styles import STYLES
from transformers.utils.chat_template_utils import render_jinja_template

from omnizoo.config.errors import UserError
from omnizoo.data.rendering import chat_template
from omnizoo.data.rendering.chat_template import ChatTemplate, TemplateRefusal

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four", "reasoning": "two and two"},
    {"role": "user", "content": "thanks"},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_template_writes_same_text_as_in_transformers(style: str, prompt: bool) -> None:
    expected = render_jinja_template(
        [MESSAGES], chat_template=STYLES[style], add_generation_prompt=prompt, tools=None, **VARIABLES
    )
    template = ChatTemplate(STYLES[style], None, VARIABLES)
    assert template.render(MESSAGES, prompt=prompt) == expected[0][0]
    assert template.render_turns(MESSAGES)[0] == template.render(MESSAGES)


def test_template_may_change_its_own_lists() -> None:
    source = (
        "{% set names = [] %}{% for m in messages %}{% set _ = names.append(m.role) %}{% endfor %}{{ names.pop() }}"
    )
    assert ChatTemplate(source, None, {}).render(MESSAGES) == "user"


@pytest.mark.parametrize("expression", ["messages.append(1)", "messages[0].parts.pop()", "tools.clear()"])
def test_template_cannot_change_messages_or_tools(expression: str) -> None:
    messages = [{"role": "user", "content": "hi", "parts": [1]}]
    with pytest.raises(TemplateRefusal, match="unsafe"):
        ChatTemplate(f"{{{{ {expression} }}}}", [{"name": "clock"}], {}).render(messages)
    assert messages[0]["parts"] == [1]


@pytest.mark.parametrize("expression", ["[].__class__", "[].append.__self__", "messages[0].__init__"])
def test_template_cannot_reach_python_objects(expression: str) -> None:
    template = ChatTemplate(f"{{% if {expression} %}}reached{{% endif %}}", None, {})
    try:
        assert template.render(MESSAGES) == ""
    except TemplateRefusal as refusal:
        assert "unsafe" in str(refusal)  # noqa: PT017 (both outcomes are safe)


def test_list_that_grows_without_end_exceeds_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.1)
    source = (
        "{% set all = [1] %}{% for i in range(99999) %}{% for j in range(99999) %}{% set _ = all.append(i) %}"
        "{% endfor %}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"^model\.tokenizer: .* CPU time"):
        ChatTemplate(source, None, {}).render(MESSAGES)
