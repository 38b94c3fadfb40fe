"""Rows become tokens and targets: which tokens the loss is on, for templates like those that models are published with.

The expectation is written by hand: each test spells out the text, with the parts the loss is on in [[double brackets]].
"""

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import CHATML, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from omnizoo.config.errors import UserError
from omnizoo.data.rendering.chat_template import ChatTemplate
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.rendering.response_spans import target_spans
from omnizoo.data.row import BadRow
from omnizoo.data.sample import RenderedRow

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# earlier turns lose their thinking; the last one gets an empty block if it has none
QWEN3 = """
{%- set ns = namespace(last_query=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set content = message.content -%}{%- set thinking = '' -%}
{%- if '</think>' in content -%}
{%- set thinking = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last_query and (loop.last or thinking) -%}
{{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}{{- content -}}{%- endif -%}
{%- for call in message.tool_calls -%}{{- '\\n<tool_call>\\n' + call.name + '\\n</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# the prompt opens a thinking block that earlier turns do not have, so the prompt is not a prefix of the conversation
THINKING_PROMPT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<A>{{ m['content'].split('</think>')[-1] }}<E>"
    "{% else %}<U>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
PLAIN_WORDS = (  # no special token at all
    "{% for m in messages %}{{ 'Question' if m['role'] == 'user' else 'Answer' }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)
GENERATION = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)


def conversation(*contents: str) -> list[dict[str, Any]]:
    """user, assistant, user, ..."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


SPECIALS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<E>")


def renderer_for(folder: Path, template: str | None, **options: Any) -> Renderer:
    return Renderer(make_tokenizer(folder, template, special_tokens=SPECIALS, **options), append_eos=True)


def shown(renderer: Renderer, row: dict[str, Any]) -> str:
    """The rendered row with [[ ]] around the runs of targets."""
    return marked(renderer, renderer.render(row))


def marked(renderer: Renderer, rendered: RenderedRow) -> str:
    """A sample with [[ ]] around the runs of targets."""
    runs = np.split(np.arange(len(rendered.input_ids)), np.flatnonzero(np.diff(rendered.is_target)) + 1)
    pieces = []
    for run in runs:
        text = renderer.tokenizer.decode(rendered.input_ids[run], clean_up_tokenization_spaces=False)
        pieces.append(f"[[{text}]]" if rendered.is_target[run[0]] else text)
    return "".join(pieces)


def test_chatml_targets_are_assistant_content_and_end_of_turn(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "be kind"}, *conversation("hi", "hello you", "and?", "so on")]}
    assert shown(renderer_for(tmp_path, CHATML), row) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n[[hello you<|im_end|>]]\n<|im_start|>user\nand?<|im_end|>\n"
        "<|im_start|>assistant\n[[so on<|im_end|>]]\n"
    )


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_llama3_template_that_trims_content_has_exact_targets(tmp_path: Path, trim_offsets: bool) -> None:
    renderer = renderer_for(tmp_path, LLAMA3, bos="<|begin|>", trim_offsets=trim_offsets)
    assert shown(renderer, {"messages": conversation("  hi ", "\n hello  ", "and?", "so  ")}) == (
        "<|begin|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[hello<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[so<|eot_id|>]]"
    )


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_mistral_template_without_generation_prompt_has_exact_targets(tmp_path: Path, trim_offsets: bool) -> None:
    # the blank before an answer is part of its first token, whatever the tokenizer's offsets say
    renderer = renderer_for(tmp_path, MISTRAL, bos="<s>", trim_offsets=trim_offsets)
    assert shown(renderer, {"messages": conversation("hi", "capital of", "and?", "so on")}) == (
        "<s>[INST] hi [/INST][[ capital of<|endoftext|>]][INST] and? [/INST][[ so on<|endoftext|>]]"
    )


def test_qwen3_template_gives_a_sample_per_turn_with_reasoning(tmp_path: Path) -> None:
    first = "<think>\nhm\n</think>\n\nhello"
    second = "<think>\nwell\n</think>\n\nso on"
    renderer = renderer_for(tmp_path, QWEN3)
    samples = renderer.render_samples({"messages": conversation("hi", first, "and?", second)})
    assert [marked(renderer, sample) for sample in samples] == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n[[<think>\nwell\n</think>\n\nso on<|im_end|>]]\n",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[<think>\nhm\n</think>\n\nhello<|im_end|>]]\n",
    ]


def test_inserted_empty_think_block_is_a_target(tmp_path: Path) -> None:
    assert shown(renderer_for(tmp_path, QWEN3), {"messages": conversation("hi", "hello", "and?", "so on")}) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[hello<|im_end|>]]\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\nso on<|im_end|>]]\n"
    )


def test_tool_calls_are_targets_of_their_turn(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]}
    answer = {"role": "tool", "content": "noon", "tool_calls": None}
    messages = [*conversation("time?"), call, answer, *conversation("-", "noon it is")[1:], *conversation("ok", "bye")]
    assert shown(renderer_for(tmp_path, QWEN3), {"messages": messages}) == (
        "<|im_start|>user\ntime?<|im_end|>\n"
        "<|im_start|>assistant\n[[\n<tool_call>\nclock\n</tool_call><|im_end|>]]\n<|im_start|>tool\nnoon<|im_end|>\n"
        "<|im_start|>assistant\n[[noon it is<|im_end|>]]\n<|im_start|>user\nok<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\nbye<|im_end|>]]\n"
    )


def test_generation_prompt_missing_in_conversation_keeps_targets_exact(tmp_path: Path) -> None:
    row = {"messages": conversation("hi", "hello", "and <A><think>\n?", "so on")}
    assert shown(renderer_for(tmp_path, THINKING_PROMPT), row) == (
        "<U>hi<A>[[hello<E>]]<U>and <A><think>\n?<A>[[so on<E>]]"
    )


def test_template_without_special_tokens_has_exact_targets(tmp_path: Path) -> None:
    text = shown(renderer_for(tmp_path, PLAIN_WORDS), {"messages": conversation("1", "2", "3", "4")})
    assert text == "Question: 1\nAnswer:[[ 2]]\nQuestion: 3\nAnswer:[[ 4]]\n"


@pytest.mark.parametrize("template", [CHATML, QWEN3, GENERATION])
def test_template_text_inside_messages_does_not_shift_targets(tmp_path: Path, template: str) -> None:
    trick = "<|im_end|>\n<|im_start|>assistant\nfooled<|im_end|>\n<|im_start|>assistant\n"
    row = {"messages": conversation(trick, "a " + trick + " z", "mark0x and mark1x " + trick, "mark0x")}
    think = "<think>\n\n</think>\n\n" if template == QWEN3 else ""
    assert shown(renderer_for(tmp_path, template), row) == (
        f"<|im_start|>user\n{trick}<|im_end|>\n<|im_start|>assistant\n[[a {trick} z<|im_end|>]]\n"
        f"<|im_start|>user\nmark0x and mark1x {trick}<|im_end|>\n<|im_start|>assistant\n[[{think}mark0x<|im_end|>]]\n"
    )


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_loss_of_a_message_overrides_its_role(tmp_path: Path, template: str) -> None:
    messages = conversation("hi", "hello", "and?", "so on")
    messages[1]["loss"], messages[2]["loss"], messages[3]["loss"] = False, True, None  # None: as columnar files have it
    assert shown(renderer_for(tmp_path, template), {"messages": messages}) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\n[[and?<|im_end|>]]\n<|im_start|>assistant\n[[so on<|im_end|>]]\n"
    )


def test_generation_tags_match_the_mask_of_transformers(tmp_path: Path) -> None:
    renderer = renderer_for(tmp_path, GENERATION)
    messages = conversation("hi", "hello  é🙂", "and?", "so on")
    expected = renderer.tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    rendered = renderer.render({"messages": messages})
    assert rendered.input_ids.tolist() == expected["input_ids"]
    assert rendered.is_target.astype(int).tolist() == expected["assistant_masks"]


def test_long_conversation_needs_little_memory() -> None:
    """Its beginnings, one for each turn, are 100 times its length together."""
    said = [{"role": role, "content": f"{i} " + "a b " * 2500} for i in range(100) for role in ("user", "assistant")]
    template = ChatTemplate(CHATML, None, {})
    tracemalloc.start()
    text, spans = target_spans(template, said, [float(message["role"] == "assistant") for message in said])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [text[a:b].partition(" ")[0] for (a, b), _ in spans] == [str(i) for i in range(100)]
    assert peak < 12 * len(text)


def test_conversation_may_start_with_the_assistant(tmp_path: Path) -> None:
    row = {"messages": conversation("-", "welcome", "hi", "hello")[1:]}
    assert shown(renderer_for(tmp_path, CHATML), row) == (
        "<|im_start|>assistant\n[[welcome<|im_end|>]]\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n[[hello<|im_end|>]]\n"
    )


def test_tools_and_extra_keys_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools[0].name }}:{% for m in messages %}{{ m.name }}>{{ m.content }}<E>{% endfor %}"
    messages = [{"role": "user", "content": "q", "name": "ann"}, {"role": "assistant", "content": "a", "name": "bot"}]
    text = shown(renderer_for(tmp_path, template), {"messages": messages, "tools": [{"name": "clock"}]})
    assert text == "clock:ann>q<E>bot>[[a<E>]]"


words = st.sampled_from([*"ab \n🙂é", "<|im_end|>", "<|im_start|>assistant\n", "</s>", "mark0x"])
contents = st.lists(words, max_size=12).map("".join)


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML, trim_offsets=True)


@given(st.lists(contents, min_size=2, max_size=6), st.booleans())
@settings(max_examples=80, deadline=None)
def test_targets_are_exactly_the_assistant_messages(
    chat_tokenizer: PreTrainedTokenizerFast, texts: list[str], rewrites: bool
) -> None:
    # with a template that counts the turns in its first line, no beginning of a conversation is a prefix of it
    chat_tokenizer.chat_template = ("{{ messages | length }}\n" if rewrites else "") + CHATML
    rendered = Renderer(chat_tokenizer, append_eos=True).render({"messages": conversation(*texts)})
    expected: list[bool] = []
    head = chat_tokenizer(f"{len(texts)}\n" if rewrites else "").input_ids
    ids = list(head)
    expected = [False] * len(head)
    for i, text in enumerate(texts):  # special tokens never merge with their surroundings; a newline may
        for piece, is_target in (
            (f"<|im_start|>{('user', 'assistant')[i % 2]}\n", False),
            (text + "<|im_end|>", i % 2 == 1),
        ):
            ids += chat_tokenizer(piece).input_ids
            expected += [is_target] * (len(ids) - len(expected))
        ids += chat_tokenizer("\n").input_ids
        expected += [False] * (len(ids) - len(expected))
    if rendered.input_ids.tolist() == ids:  # else: a newline merged with the content
        assert rendered.is_target.tolist() == expected
    else:
        assert chat_tokenizer.decode(rendered.input_ids) == chat_tokenizer.decode(ids)


def test_text_matches_transformers_and_ends_with_one_eos(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, bos="<s>")
    text = "A pack holds samples 🙂 of many rows"
    plain = tokenizer(text).input_ids
    assert plain[0] == tokenizer.bos_token_id
    ended = Renderer(tokenizer, append_eos=True).render({"text": text})
    assert ended.input_ids.tolist() == [*plain, tokenizer.eos_token_id]
    assert ended.is_target.all()
    assert (
        Renderer(tokenizer, append_eos=True).render({"text": text + "<|endoftext|>"}).input_ids.tolist()
        == ended.input_ids.tolist()
    )
    assert Renderer(tokenizer, append_eos=False).render({"text": text}).input_ids.tolist() == plain


def test_truncation_and_padding_saved_with_a_tokenizer_are_ignored(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    expected = Renderer(tokenizer, append_eos=False).render({"text": "one two three"}).input_ids.tolist()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert Renderer(tokenizer, append_eos=False).render({"text": "one two three"}).input_ids.tolist() == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x"}, "the row has 'prompt'"),
        ({}, "no fields"),
        ({"text": None, "messages": None}, "`messages`, `conversations` and `text`"),
        ({"text": ""}, "`text` is empty"),
        ({"text": 3}, "`text` is int"),
        ({"messages": []}, "empty"),
        ({"messages": "hi"}, "not a list"),
        ({"messages": ["hi"]}, "message 0 is not an object"),
        ({"messages": [{"content": "hi"}]}, "message 0 is not an object with a `role`"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "part 0 of `content` of message 0 is not an object"),
        ({"messages": [{"role": "user"}]}, "`content` of message 0 is NoneType"),
        ({"messages": [{"role": "user", "content": "x", "loss": "yes"}]}, "`loss` of message 0"),
        ({"messages": conversation("only a question")}, "no targets"),
        ({"messages": conversation("a", "b"), "tools": "x"}, "`tools` is a string"),
    ],
)
def test_bad_row_has_a_reason(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=re.escape(reason)):
        renderer_for(tmp_path, CHATML).render(row)


def test_row_with_a_single_token_is_bad(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match="no targets"):
        Renderer(make_tokenizer(tmp_path), append_eos=False).render({"text": "a"})


def test_conversation_rejected_by_the_template_is_bad(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match="roles must alternate"):
        renderer_for(tmp_path, MISTRAL, bos="<s>").render({"messages": conversation("a", "b")[::-1]})


def test_row_with_hidden_message_suggests_generation_tags(tmp_path: Path) -> None:
    template = "{{ messages | length }} {{ messages[0]['content'] | upper }}"
    with pytest.raises(BadRow, match=r"message 1 .*{% generation %}"):
        renderer_for(tmp_path, template).render({"messages": conversation("a", "b")})


def test_messages_without_a_chat_template_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        renderer_for(tmp_path, None).render({"messages": conversation("a", "b")})


def test_append_eos_without_an_eos_token_raises(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"^data\.append_eos"):
        Renderer(tokenizer, append_eos=True).render({"text": "a b"})


def test_slow_tokenizer_raises() -> None:
    class Slow:
        is_fast = False
        name_or_path = "some/folder"

    with pytest.raises(UserError, match=r"^some/folder: .* not a fast tokenizer"):
        Renderer(Slow(), append_eos=True)  # type: ignore[arg-type]
