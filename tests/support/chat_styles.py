"""Small chat templates in the styles of published ones: how they write turns, tool calls, their results and reasoning.

Each style names what is unusual about it. Conversations and the expected text are in test_chat_styles.py.
"""

CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
CHATML_CALLS = "{% for call in m.tool_calls %}\n<tool_call>\n" + CALL + "\n</tool_call>{% endfor %}"
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# The content is written as it is; calls follow it.
PLAIN = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}" + CHATML_CALLS + "{% endif %}<|im_end|>\n{% endfor %}" + CHATML_PROMPT
)
# Reasoning only after the last question; an empty think block in the last turn.
LAST_REASONS = (
    TOOLS + "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set content = m.content %}"
    "{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ content }}{% if m.tool_calls %}" + CHATML_CALLS + "{% endif %}"
    "{% else %}{{ content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The prompt opens a think block, which earlier turns lack.
OPEN_THOUGHT = LAST_REASONS.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", "<think>\n"
)
# Turns without headers; a turn with calls has no content; the tools come before the last question.
INSTRUCTIONS = (
    "{{ bos_token }}{% set questions = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == questions[-1] %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}"
    "[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Calls as one JSON list with ids after the arguments.
CALL_LIST = INSTRUCTIONS.replace(
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}"
    "[ARGS]{{ call.function.arguments | tojson }}{% endfor %}",
    "[TOOL_CALLS][{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]",
)
# A prompt always follows; results are found by a loop inside a turn, and a macro looks for the number of the call.
ACTIONS = (
    "{% macro number(all, id) %}{% set ns = namespace(n=0) %}{% for m in all %}{% for call in m.tool_calls %}"
    "{% if call.id == id %}{{ ns.n }}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}{% endmacro %}"
    "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}{% if m.role == 'user' %}<|turn|><|user|>{{ m.content }}"
    "<|end|>{% elif m.role == 'assistant' %}<|turn|><|bot|>{% if m.tool_calls %}<|think|>{{ m.reasoning_content }}"
    '<|/think|><|action|>[{% for call in m.tool_calls %}{"tool": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}{% endfor %}]<|/action|>'
    "{% else %}<|response|>{{ m.content }}<|/response|>{% endif %}<|end|>"
    "{% elif messages[loop.index0 - 1].role != 'tool' %}<|turn|><|system|><|result|>"
    "{{ number(messages, m.tool_call_id) }}: {{ m.content }}{% for other in messages[loop.index:] %}"
    "{% if other.role != 'tool' %}{% break %}{% endif %}, {{ number(messages, other.tool_call_id) }}: "
    "{{ other.content }}{% endfor %}<|/result|><|end|>{% endif %}{% endfor %}<|turn|><|bot|><|think|><|/think|>"
)
# Results of calls are written inside the turn of the call, which the answer continues.
NESTED_RESULTS = (
    "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}"
    "{% set before = messages[loop.index0 - 1].role if loop.index0 else '' %}"
    "{% if m.role == 'user' %}<|turn>user\n{{ m.content }}<turn|>\n{% elif m.role == 'assistant' %}"
    "{% if before != 'tool' %}<|turn>model\n{% endif %}{% if m.reasoning_content %}<|channel>thought\n"
    "{{ m.reasoning_content }}<channel|>{% endif %}{% for call in m.tool_calls %}<|tool_call>call:"
    "{{ call.function.name }}{{ '{' }}{% for key, value in call.function.arguments | dictsort %}{{ key }}:"
    "{{ value }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
    "{% set ns = namespace(open=true) %}{% if m.tool_calls %}<|tool_response>"
    "{% for k in range(loop.index, messages | length) %}{% if ns.open and messages[k].role == 'tool' %}"
    "{value:{{ messages[k].content }}}{% else %}{% set ns.open = false %}{% endif %}{% endfor %}"
    "{% if not loop.last %}<tool_response|>{% endif %}{% endif %}{{ m.content }}"
    "{% if not m.tool_calls %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
# The last turn is written after the loop, with an open think tag; earlier turns lose their reasoning.
LAST_APART = (
    "{% set ns = namespace(last=none) %}{% set past = messages %}{% if messages[-1].role == 'assistant' %}"
    "{% set ns.last = messages[-1] %}{% set past = messages[:-1] %}{% endif %}<S10>System\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% for m in past %}{% if m.role == 'assistant' %}<S11>Assistant\n{{ m.content.split('</think>')[-1].strip() }}"
    "{% if m.tool_calls %}<TOOLCALL>[{% for call in m.tool_calls %}"
    + CALL
    + "{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}\n<S12>\n"
    "{% else %}<S11>{{ m.role }}\n{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<S11>Assistant\n<think>\n{% elif ns.last %}"
    "<S11>Assistant\n{% if ns.last.tool_calls %}"
    "<TOOLCALL>[{% for call in ns.last.tool_calls %}"
    + CALL
    + (
        "{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% else %}<think>\n{{ ns.last.content }}{% endif %}"
        "\n<S12>\n{% endif %}"
    )
)
# The last turn has no end; its reasoning is separated by a phrase, and earlier turns lose it.
UNFINISHED = (
    "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}{% if m.role == 'assistant' %}<|begin_assistant|>\n"
    "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}\n[BEGIN FINAL RESPONSE]\n{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}\n<tool_calls>[{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}'
    '{% if not (loop.last and m == messages[-1]) %}, "id": "{{ call.id }}"{% endif %}}'
    "{{ ', ' if not loop.last }}{% endfor %}]</tool_calls>{% endif %}{% if not loop.last %}\n<|end|>\n{% endif %}"
    "{% else %}<|begin_{{ m.role }}|>\n{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin_assistant|>\nHere are my reasoning steps:\n{% endif %}"
)
# Think tags in every turn; only earlier turns have an end.
TAGGED_THOUGHTS = (
    "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<result>{{ m.content }}</result>"
    "{% else %}<|assistant|><think>{{ m.reasoning_content or '' }}</think>{{ m.content }}{% for call in m.tool_calls %}"
    "<tool_call>{{ call.function.name }}{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}"
    "</arg_key><arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
    "{% if not loop.last %}<|eos|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
# A queue of call ids, which the template fills and empties.
QUEUE = (
    "{% set queue = namespace(ids=[]) %}{{ tools | tojson }}{% for m in messages %}<|im_{{ m.role }}|><|im_middle|>"
    "{{ m.content }}{% if m.tool_calls %}<|calls|>{% for call in m.tool_calls %}"
    "{% set id = 'functions.' + call.function.name + ':' + loop.index0 | string %}"
    "{% set _ = queue.ids.append(id) %}<|call|>{{ id }}<|arguments|>{{ call.function.arguments | tojson }}<|/call|>"
    "{% endfor %}<|/calls|>{% elif m.role == 'tool' %} of {{ queue.ids.pop(0) }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|><|im_middle|>{% endif %}"
)
# Channels: a call and an answer have other headers, and the last turn another end. Reasoning only in the last turn.
CHANNELS = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}<|channel|>commentary<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Reasoning is removed from all turns.
NO_THOUGHTS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)

STYLES = {
    "plain": PLAIN,
    "last_reasons": LAST_REASONS,
    "open_thought": OPEN_THOUGHT,
    "instructions": INSTRUCTIONS,
    "call_list": CALL_LIST,
    "actions": ACTIONS,
    "nested_results": NESTED_RESULTS,
    "last_apart": LAST_APART,
    "unfinished": UNFINISHED,
    "tagged_thoughts": TAGGED_THOUGHTS,
    "queue": QUEUE,
    "channels": CHANNELS,
    "no_thoughts": NO_THOUGHTS,
}
