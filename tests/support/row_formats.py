"""Files of rows as people bring them, by format and quirk, and what each must become: the text as the model sees it,
with the loss between [[ and ]]; or the reason why it is refused. Written by hand, from what the formats mean in the
tools that they come from.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Row = dict[str, Any]
Write = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    name: str
    file: str
    write: Write
    expected: str  # or, of what is refused, a part of the reason
    format: str = ""  # what it is taken as; "": it is refused
    source: dict[str, Any] = field(default_factory=dict)  # keys of `data.sources.0`
    row: int = 0
    ignore: tuple[str, ...] = ()
    opens: bool = True  # False: the source itself is refused


CASES: list[Case] = []


def lines(*rows: Any) -> Write:
    """A row, or a line as it stands."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return lambda path: path.write_text(text) and None


def raw(text: str | bytes) -> Write:
    return lambda path: path.write_bytes(text.encode() if isinstance(text, str) else text) and None


def array(*rows: Row) -> Write:
    return lambda path: path.write_text(json.dumps(list(rows), indent=2)) and None


def table(*rows: Row) -> Write:
    return lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def becomes(name: str, taken: str, write: Write, expected: str, file: str = "rows.jsonl", **options: Any) -> None:
    more = {key: options.pop(key) for key in ("row", "ignore") if key in options}
    CASES.append(Case(name, file, write, expected, taken, options, **more))


def refused(name: str, write: Write, reason: str, file: str = "rows.jsonl", **options: Any) -> None:
    more = {key: options.pop(key) for key in ("row", "ignore", "opens") if key in options}
    CASES.append(Case(name, file, write, reason, "", options, **more))


def chat(*turns: str, system: str = "") -> str:
    """A conversation, in ChatML."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    for number, turn in enumerate(turns):
        role = "assistant" if number % 2 else "user"
        said = f"[[{turn}<|im_end|>]]" if number % 2 else f"{turn}<|im_end|>"
        text += f"<|im_start|>{role}\n{said}\n"
    return text


def prose(text: str) -> str:
    return f"[[{text}<|endoftext|>]]"


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SHARE = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
ALPACA = {"instruction": "add", "input": "1 1", "output": "2"}

# Alpaca

becomes("alpaca", "alpaca", lines(ALPACA), chat("add\n1 1", "2"))
becomes("alpaca with an empty input", "alpaca", lines(ALPACA | {"input": ""}), chat("add", "2"))
becomes("alpaca with a null input", "alpaca", lines(ALPACA | {"input": None}), chat("add", "2"))
becomes("alpaca without input", "alpaca", lines({"instruction": "add", "output": "2"}), chat("add", "2"))
becomes("alpaca with an empty instruction", "alpaca", lines(ALPACA | {"instruction": ""}), chat("1 1", "2"))
becomes("alpaca with a system prompt", "alpaca", lines(ALPACA | {"system": "so"}), chat("add\n1 1", "2", system="so"))
becomes("alpaca with history", "alpaca", lines(ALPACA | {"history": [["a", "b"], ["c", "d"]]}),
        chat("a", "b", "c", "d", "add\n1 1", "2"))  # fmt: skip
becomes("alpaca with empty history", "alpaca", lines(ALPACA | {"history": []}), chat("add\n1 1", "2"))
becomes("alpaca with history as JSON text", "alpaca", lines(ALPACA | {"history": '[["a", "b"]]'}),
        chat("a", "b", "add\n1 1", "2"))  # fmt: skip
becomes("alpaca with an id", "alpaca", lines(ALPACA | {"id": 7, "source": "x"}), chat("add\n1 1", "2"))
becomes("alpaca in an array", "alpaca", array(ALPACA, ALPACA), chat("add\n1 1", "2"), "rows.json")
becomes("an array in which all answers are dates", "alpaca", array(ALPACA | {"output": "2024-01-01"}),
        chat("add\n1 1", "2024-01-01"), "rows.json")  # fmt: skip
becomes("an array with a mark at its beginning, in one line", "alpaca",
        raw(b"\xef\xbb\xbf" + json.dumps([{"text": "\u00e4"}, ALPACA], ensure_ascii=False).encode()),
        chat("add\n1 1", "2"), "rows.json", row=1)  # fmt: skip
becomes("an array with texts and numbers in one field", "alpaca",
        array(ALPACA, ALPACA | {"id": "x"}, ALPACA | {"id": 3}), chat("add\n1 1", "2"), "rows.json", row=2)  # fmt: skip
refused("an array that was cut", raw('[{"text": "so"}, {"text"'), "not a valid JSON array", "rows.json", opens=False)
refused("an array without a comma", raw('[{"text": "so"}\n{"text": "a"}]'), "in line 2",
        "rows.json", opens=False)  # fmt: skip
refused("two arrays", raw('[{"text": "so"}][{"text": "a"}]'), "'[' follows", "rows.json", opens=False)
refused("an empty array", raw("[]"), "no rows", "rows.json", opens=False)
refused("an array of texts", raw('["so"]'), "JSON object", "rows.json")
becomes("alpaca in Parquet with nulls", "alpaca", table(ALPACA, {"instruction": "so", "output": "ok"}),
        chat("so", "ok"), "rows.parquet", row=1)  # fmt: skip
becomes("alpaca with a number for text, quoted", "alpaca", lines(ALPACA | {"output": "42"}), chat("add\n1 1", "42"))
becomes("alpaca with its text column ignored", "alpaca", lines(ALPACA | {"text": "add 1 1 2"}), chat("add\n1 1", "2"),
        ignore=("text",))  # fmt: skip
becomes("alpaca by its name, the text left out", "alpaca", lines(ALPACA | {"text": "add 1 1 2"}), chat("add\n1 1", "2"),
        format="alpaca")  # fmt: skip
becomes(
    "the text of alpaca by its name", "text", lines(ALPACA | {"text": "so it is"}), prose("so it is"), format="text"
)
refused("alpaca with a text column", lines(ALPACA | {"text": "add 1 1 2"}),
        "data.sources.0.format to one of text, alpaca")  # fmt: skip
refused("alpaca with a number", lines(ALPACA | {"output": 2}), "`output` is int")
refused("alpaca with an empty output", lines(ALPACA | {"output": ""}), "`output` is empty")
refused("alpaca with a null output", lines(ALPACA | {"output": None}), "`messages`, `conversations` and `text`")
refused("alpaca with nothing to answer", lines({"instruction": "", "input": "", "output": "2"}), "prompt is empty")
refused("alpaca with an odd history", lines(ALPACA | {"history": [["a"]]}), "entry 0 of `history`")
refused("alpaca with broken history", lines(ALPACA | {"history": "[['a', 'b']]"}), "json.dumps")
refused("alpaca with an unused field", lines(ALPACA | {"hints": "x"}), "`hints` is not used")
refused("alpaca with a score", lines(ALPACA | {"score": 3}), "`score` is not used")
refused("alpaca by name, of which one is none", lines(ALPACA, {"text": "so"}),
        "data.sources.0.format is alpaca, which needs `instruction` and `output`", row=1, format="alpaca")  # fmt: skip

# prompt and completion

becomes("prompt and completion", "prompt_completion", lines({"prompt": "hi there.", "completion": " yes"}),
        "hi there.[[ yes<|endoftext|>]]")  # fmt: skip
becomes("an empty prompt", "prompt_completion", lines({"prompt": "", "completion": "yes"}), prose("yes"))
becomes("prompt and completion as messages", "prompt_completion",
        lines({"prompt": TURNS[:1], "completion": TURNS[1:]}), chat("hi", "yes"))  # fmt: skip
becomes("a prompt of several turns, of which none is learnt", "prompt_completion",
        lines({"prompt": [*TURNS, {"role": "user", "content": "so"}], "completion": TURNS[1:]}),
        chat("hi", "yes", "so", "yes").replace("[[yes<|im_end|>]]", "yes<|im_end|>", 1))  # fmt: skip
becomes("a single message as completion", "prompt_completion", lines({"prompt": TURNS[:1], "completion": TURNS[1]}),
        chat("hi", "yes"))  # fmt: skip
becomes("prompt and completion of ShareGPT", "prompt_completion", lines({"prompt": SHARE[:1], "completion": SHARE[1:]}),
        chat("hi", "yes"))  # fmt: skip
becomes("prompt and completion in Parquet", "prompt_completion", table({"prompt": TURNS[:1], "completion": TURNS[1:]}),
        chat("hi", "yes"), "rows.parquet")  # fmt: skip
becomes("messages as JSON, where that is said", "prompt_completion",
        lines({"prompt": json.dumps(TURNS[:1]), "completion": json.dumps(TURNS[1:])}), chat("hi", "yes"),
        json_columns=["prompt", "completion"])  # fmt: skip
becomes("JSON that is a text, where that is said", "prompt_completion",
        lines({"prompt": "write.", "completion": ' [{"role": "a", "content": "b"}]'}),
        'write.[[ [{"role": "a", "content": "b"}]<|endoftext|>]]', json_columns=[])  # fmt: skip
becomes("JSON that is no conversation", "prompt_completion", lines({"prompt": "write.", "completion": ' {"a": 1}'}),
        'write.[[ {"a": 1}<|endoftext|>]]')  # fmt: skip
refused("messages as JSON, or a text", lines({"prompt": "hi", "completion": json.dumps(TURNS[1:])}),
        "data.sources.0.json_columns: [completion]")  # fmt: skip
refused("a text and messages", lines({"prompt": "hi", "completion": TURNS[1:]}), "are str and list")
refused("an empty completion", lines({"prompt": "hi", "completion": ""}), "`completion` is empty")
refused("a labelled completion", lines({"prompt": "hi", "completion": "yes", "label": True}), "`label` is not used")
refused(
    "a preference pair", lines({"prompt": "hi", "chosen": "a", "rejected": "b"}), "`chosen`, `rejected` are not used"
)
refused("a system prompt next to texts", lines({"prompt": "hi", "completion": "yes", "system": "so"}), "`system`")
refused("a prompt alone", lines({"prompt": "hi"}), "`messages`, `conversations` and `text`")

# query and response

becomes("query and response", "query_response", lines({"query": "hi", "response": "yes"}), chat("hi", "yes"))
becomes("query, response, history, system", "query_response",
        lines({"query": "c", "response": "d", "history": [["a", "b"]], "system": "so"}),
        chat("a", "b", "c", "d", system="so"))  # fmt: skip
refused(
    "a rejected response", lines({"query": "hi", "response": "yes", "rejected_response": "no"}), "rejected_response"
)
refused("query, response and messages", lines({"query": "hi", "response": "yes", "messages": TURNS}),
        "data.sources.0.format to one of messages, query_response")  # fmt: skip
becomes("query, response and messages, of which messages", "messages",
        lines({"query": "so", "response": "no", "messages": TURNS}), chat("hi", "yes"), format="messages")  # fmt: skip
refused(
    "LLaMA-Factory's names of columns", lines({"prompt": "a", "query": "b", "response": "c"}), "`prompt` is not used"
)

# other names

becomes("renamed to a text", "text", lines({"body": "so it is"}), prose("so it is"), columns={"text": "body"})
becomes("renamed to messages", "messages", lines({"dialog": TURNS}), chat("hi", "yes"), columns={"messages": "dialog"})
becomes("renamed to a chat", "query_response", lines({"question": "hi", "answer": "yes"}), chat("hi", "yes"),
        columns={"query": "question", "response": "answer"})  # fmt: skip
becomes("renamed to alpaca, one of them missing in a row", "alpaca",
        lines({"q": "add", "x": "1 1", "a": "2"}, {"q": "add", "a": "2"}), chat("add", "2"), row=1,
        columns={"instruction": "q", "input": "x", "output": "a"})  # fmt: skip
becomes("names that change places", "prompt_completion", lines({"prompt": " yes", "completion": "hi."}),
        "hi.[[ yes<|endoftext|>]]", columns={"prompt": "completion", "completion": "prompt"})  # fmt: skip
becomes("renamed columns of CSV", "query_response", raw("q,a\nhi,yes\n"), chat("hi", "yes"), "rows.csv",
        columns={"query": "q", "response": "a"})  # fmt: skip
becomes("renamed in Parquet, of structs", "messages", table({"dialog": TURNS}), chat("hi", "yes"), "rows.parquet",
        columns={"messages": "dialog"})  # fmt: skip
refused("a column map to nowhere", lines({"body": "so"}),
        "data.sources.0.columns: none of the first 1 rows has a field 'bdoy'; they have body; did you mean body?",
        opens=False, columns={"text": "bdoy"})  # fmt: skip
refused("a column map the other way round", lines({"body": "so"}),
        "data.sources.0.columns: none of the first 1 rows has a field 'text'", opens=False,
        columns={"body": "text"})  # fmt: skip
refused("JSON in a column to nowhere", lines({"text": "so"}), "data.sources.0.json_columns: none of the first 1 rows",
        opens=False, json_columns=["dialog"])  # fmt: skip
refused("a name that is taken", lines({"body": "so", "text": "no"}), "has a field 'text'",
        columns={"text": "body"})  # fmt: skip
becomes("a name that is taken, and renamed as well", "text", lines({"body": "so", "text": "no"}), prose("so"),
        columns={"text": "body", "id": "text"})  # fmt: skip
becomes("a text called content", "document", lines({"content": "so it is", "id": 3}), prose("so it is"))
becomes("a text called document", "document", lines({"document": "so it is"}), prose("so it is"))
becomes("a text called raw_content", "document", lines({"raw_content": "so it is", "url": "x"}), prose("so it is"))
refused("a text and a title", lines({"content": "so it is", "title": "so"}), "`messages`, `conversations` and `text`")
refused("a text of another name", lines({"verse": "so it is"}), "data.sources.0.columns: {text: verse}")
refused("question and answer", lines({"question": "hi", "answer": "yes"}),
        "data.sources.0.columns: {query: question, response: answer}")  # fmt: skip
refused("input and output", lines({"input": "hi", "output": "yes"}), "columns: {query: input, response: output}")
refused("Dolly", lines({"instruction": "hi", "context": "so", "response": "yes"}),
        "columns: {input: context, output: response}")  # fmt: skip
refused("Dolly without a context", lines({"instruction": "hi", "context": "", "response": "yes"}),
        "columns: {input: context, output: response}")  # fmt: skip
becomes("Dolly, renamed", "alpaca", lines({"instruction": "hi", "context": "so", "response": "yes"}),
        chat("hi\nso", "yes"), columns={"input": "context", "output": "response"})  # fmt: skip
refused("a prompt and a response", lines({"prompt": "hi", "response": "yes"}),
        "data.sources.0.columns: {query: prompt}")  # fmt: skip
refused("messages of another name", lines({"dialog": TURNS}), "data.sources.0.columns: {messages: dialog}")

# JSON as text

becomes("messages as JSON", "messages", lines({"messages": json.dumps(TURNS)}), chat("hi", "yes"))
becomes("conversations as JSON", "messages", lines({"conversations": json.dumps(SHARE)}), chat("hi", "yes"))
becomes("messages as JSON in CSV", "messages",
        raw("messages\n" + '"' + json.dumps(TURNS).replace('"', '""') + '"\n'), chat("hi", "yes"),
        "rows.csv")  # fmt: skip
becomes("messages as JSON in Parquet", "messages", table({"messages": json.dumps(TURNS)}), chat("hi", "yes"),
        "rows.parquet")  # fmt: skip
refused("messages as Python prints them", lines({"messages": str(TURNS)}), "json.dumps")
refused("messages as a text", lines({"messages": "hi"}), "`messages` is empty or not a list")
refused("broken JSON", lines({"messages": '[{"role": "user"'}), "`messages` is a string that is not valid JSON")

# CSV and TSV

becomes("CSV", "alpaca", raw("instruction,input,output\nadd,1 1,2\n"), chat("add\n1 1", "2"), "rows.csv")
becomes("CSV of Windows with a mark at its beginning", "alpaca", raw(b"\xef\xbb\xbfinstruction,output\r\nadd,2\r\n"),
        chat("add", "2"), "rows.csv")  # fmt: skip
becomes("CSV with commas, quotes and line breaks in a cell", "alpaca",
        raw('instruction,output\n"say ""no"", twice\nor not",ok\n'), chat('say "no", twice\nor not', "ok"),
        "rows.csv")  # fmt: skip
becomes("CSV after a cell of several lines", "query_response", raw('query,response\n"a\nb",c\nd,e\n'), chat("d", "e"),
        "rows.csv", row=1)  # fmt: skip
becomes("CSV with NA, 007 and 1.0 in cells", "query_response", raw("query,response\nNA,007\nnull,1.0\n"),
        chat("NA", "007"), "rows.csv")  # fmt: skip
becomes("CSV with the word null", "query_response", raw("query,response\nNA,007\nnull,1.0\n"), chat("null", "1.0"),
        "rows.csv", row=1)  # fmt: skip
becomes("CSV without a last line break", "text", raw("text\nso it is"), prose("so it is"), "rows.csv")
becomes("CSV with blank lines", "text", raw("text\n\nso\n\nit is\n"), prose("it is"), "rows.csv", row=1)
becomes("CSV with an odd line separator in a cell", "text", raw("text\nso\u2028it\n"), prose("so\u2028it"), "rows.csv")
becomes("CSV in which rows are of two formats", "text", raw("text,query,response\n,hi,yes\nso,,\n"), prose("so"),
        "rows.csv", row=1)  # fmt: skip
becomes("TSV", "query_response", raw("query\tresponse\nhi, you\tyes\n"), chat("hi, you", "yes"), "rows.tsv")
refused("CSV with a short record", raw("query,response\nhi\n"), "1 cells, but rows.csv has 2 columns", "rows.csv")
refused("CSV by semicolons", raw("query;response\nhi;yes\n"), "contains ';'", "rows.csv", opens=False)
refused("CSV with a column twice", raw("text,text\na,b\n"), "named 'text'", "rows.csv", opens=False)
refused("CSV with a broken quote", raw('text\n"so" it\n'), "rows.csv:2: not valid CSV", "rows.csv", opens=False)
refused("CSV that is not UTF-8", raw(b"text\nso \xff\n"), "rows.csv:2: not UTF-8", "rows.csv", opens=False)
refused("CSV with nothing but names", raw("text\n"), "no rows", "rows.csv", opens=False)
refused("CSV with an empty answer", raw("query,response\nhi,\n"), "`response` is empty", "rows.csv")

# token ids: those of the characters of a text, in the tokenizer of the tests

TOKENS = {"input_ids": [94, 98, 0]}  # "o", "s", the end


becomes("token ids", "tokenized", lines(TOKENS), "[[os<|endoftext|>]]")
becomes("token ids and a mask of ones", "tokenized", lines(TOKENS | {"attention_mask": [1, 1, 1]}),
        "[[os<|endoftext|>]]")  # fmt: skip
becomes("token ids with padding at both ends", "tokenized",
        lines({"input_ids": [1, 94, 98, 1, 1], "attention_mask": [0, 1, 1, 0, 0]}), "[[os]]")  # fmt: skip
becomes("token ids with labels", "tokenized", lines(TOKENS | {"labels": [-100, 98, -100]}), "o[[s]]<|endoftext|>")
becomes("token ids with a mask of the loss", "tokenized", lines(TOKENS | {"loss_mask": [0, 0, 1]}),
        "os[[<|endoftext|>]]")  # fmt: skip
becomes("token ids with the masks of TRL", "tokenized",
        lines(TOKENS | {"completion_mask": [False, True, True], "assistant_masks": [1.0, 1.0, 0.0]}),
        "o[[s]]<|endoftext|>")  # fmt: skip
becomes("token ids with labels in Parquet, of which a row has none", "tokenized",
        table(TOKENS | {"labels": [94, 98, 0]}, TOKENS), "[[os<|endoftext|>]]", "rows.parquet", row=1)  # fmt: skip
becomes("token ids as JSON in CSV, where that is said", "tokenized", raw('input_ids\n"[94, 98, 0]"\n'),
        "[[os<|endoftext|>]]", "rows.csv", json_columns=["input_ids"])  # fmt: skip
becomes("token ids of another name", "tokenized", lines({"tokens": [94, 98, 0]}), "[[os<|endoftext|>]]",
        columns={"input_ids": "tokens"})  # fmt: skip
becomes("token ids and their text, by name", "tokenized", lines(TOKENS | {"text": "os"}), "[[os<|endoftext|>]]",
        format="tokenized")  # fmt: skip
becomes("token ids and their text, of which the text", "text", lines(TOKENS | {"attention_mask": [1], "text": "so"}),
        prose("so"), format="text")  # fmt: skip
becomes("token ids of two documents", "tokenized", lines({"input_ids": [94, 98] * 2, "position_ids": [0, 1, 0, 1]}),
        "[[osos]]")  # fmt: skip
refused("token ids and their text", lines(TOKENS | {"text": "os"}),
        "data.sources.0.format to one of text, tokenized")  # fmt: skip
refused(
    "token ids of another name, not renamed", lines({"tokens": [94]}), "data.sources.0.columns: {input_ids: tokens}"
)
refused("token ids as JSON in CSV", raw('input_ids\n"[94, 98, 0]"\n'), "list it in json_columns", "rows.csv")
refused("token ids and a sound", lines(TOKENS | {"audio": "2.toy"}), "cannot have media (`audio`)")
refused("token ids and an unused field", lines(TOKENS | {"token_type_ids": [0, 0, 0]}), "`token_type_ids` is not used")
refused("token ids and a mask without content", lines({"attention_mask": [1]}), "pre-tokenized rows need `input_ids`")

# what was read before

becomes("a text", "text", lines({"text": "so it is"}), prose("so it is"))
becomes("messages", "messages", lines({"messages": TURNS}), chat("hi", "yes"))
becomes("conversations", "messages", lines({"conversations": SHARE}), chat("hi", "yes"))
VALUES = [{"role": "user", "content": [{"type": "text", "value": "hi"}], "loss_weight": 0.0},
          {"role": "assistant", "content": [{"type": "text", "value": "yes"}], "loss_weight": 1.0}]  # fmt: skip
becomes("parts with a value, as in LLaMA-Factory", "messages", lines({"messages": VALUES}), chat("hi", "yes"))
becomes("a response with loss weight 0", "messages",
        lines({"messages": [*VALUES[:1], VALUES[1] | {"loss_weight": 0.0}, *VALUES]}),
        chat("hi", "yes", "hi", "yes").replace("[[yes<|im_end|>]]", "yes<|im_end|>", 1))  # fmt: skip
refused("a loss weight that is not a number", lines({"messages": [VALUES[0], VALUES[1] | {"loss_weight": "1"}]}),
        "`loss_weight` of message 1")  # fmt: skip
refused("a loss weight of the user", lines({"messages": [VALUES[0] | {"loss_weight": 1.0}, VALUES[1]]}),
        "`loss_weight` of message 0 (user) is 1")  # fmt: skip
refused("two loss weights", lines({"messages": [VALUES[0], VALUES[1] | {"weight": 0.5}]}), "contradict")
refused("reasoning after the text", lines({"messages": [TURNS[0], {"role": "assistant", "content": [
        {"type": "text", "value": "yes"}, {"type": "reasoning", "value": "hm"}]}]}), "part 1 of message 1")  # fmt: skip
refused("reasoning of the user", lines({"messages": [{"role": "user", "content": [
        {"type": "reasoning", "value": "hm"}]}, TURNS[1]]}), "part 0 of message 0")  # fmt: skip
refused("a text after a tool call", lines({"messages": [TURNS[0], {"role": "assistant", "content": [
        {"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}, {"type": "text", "value": "yes"}]}]}),
        "part 1 of message 1")  # fmt: skip
becomes("a text with words that look like JSON", "text", lines({"text": '[{"role": "a"}]'}), prose('[{"role": "a"}]'))
becomes("lines of a text file", "text", raw("so it is\nand so on\n"), prose("and so on"), "rows.txt", row=1)
refused("messages and a text", lines({"messages": TURNS, "text": "so"}), "`messages` and `text`")
refused("an array of lines", lines(["a"]), "JSON object")
refused("nothing", lines({}), "no fields")

# media; the model reads sounds and draws tones, pictures it both reads and draws

MEDIA = {"audio": "2.toy"}
becomes("a caption", "caption", lines(MEDIA | {"caption": "so"}), "<audio:(2 audio):audio>so<|endoftext|>")
becomes("a caption called text", "caption", lines(MEDIA | {"text": "so"}), "<audio:(2 audio):audio>so<|endoftext|>")
becomes("several items and a caption", "caption", lines({"audios": ["2.toy", "3.toy"], "caption": "so"}),
        "<audio:(2 audio):audio><audio:(3 audio):audio>so<|endoftext|>")  # fmt: skip
becomes("items as JSON text", "caption", raw('audios,caption\n"[""2.toy"", ""3.toy""]",so\n'),
        "<audio:(2 audio):audio><audio:(3 audio):audio>so<|endoftext|>", "rows.csv")  # fmt: skip
becomes("bytes in Parquet and a caption", "caption",
        table({"audio": {"bytes": b"TOY\x02", "path": None}, "caption": "so"}),
        "<audio:(2 audio):audio>so<|endoftext|>", "rows.parquet")  # fmt: skip
becomes("a drawing after its caption", "from_caption", lines({"tone": "2.toy", "caption": "so"}),
        "so<tone:(3 tone):tone><|endoftext|>")  # fmt: skip
becomes("a caption of what is read and drawn, read", "caption", lines({"image": "2.toy", "caption": "so"}),
        "<image:(3 image):image>so<|endoftext|>", format="caption")  # fmt: skip
refused("a caption of what is read and drawn", lines({"image": "2.toy", "caption": "so"}),
        "data.sources.0.format to one of caption, from_caption")  # fmt: skip
becomes("a text with a place for its item", "text", lines(MEDIA | {"text": "hear <audio>."}),
        "hear <audio:(2 audio):audio>.<|endoftext|>")  # fmt: skip
becomes("alpaca with a place for an item", "alpaca", lines(ALPACA | {"instruction": "<audio>add", "audios": ["2.toy"]}),
        chat("<audio:(2 audio):audio>add\n1 1", "2"))  # fmt: skip
refused("alpaca with an item and no place", lines(ALPACA | {"audios": ["2.toy"]}), "<audio> occurs 0 times")
refused("a transcript of another name", lines(MEDIA | {"sentence": "so"}),
        "data.sources.0.columns: {caption: sentence}")  # fmt: skip
refused("an item, a question and an answer", lines(MEDIA | {"question": "hi", "answer": "yes"}),
        "data.sources.0.columns: {query: question, response: answer}")  # fmt: skip
QUESTION = {"query": "question", "response": "answer"}
refused("an item without a tag", lines(MEDIA | {"question": "hi", "answer": "yes"}),
        "data.sources.0.untagged_media: first", columns=QUESTION)  # fmt: skip
HEARD = "<audio:(2 audio):audio>"
becomes("an item before a question", "query_response", lines(MEDIA | {"question": "hi", "answer": "yes"}),
        chat(f"{HEARD}hi", "yes"), columns=QUESTION, untagged_media="first")  # fmt: skip
becomes("two items before the messages of ms-swift", "messages", lines({"messages": TURNS, "audios": ["2.toy"] * 2}),
        chat(f"{HEARD}{HEARD}hi", "yes"), untagged_media="first")  # fmt: skip
becomes("an item before parts", "messages",
        lines(MEDIA | {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, TURNS[1]]}),
        chat(f"{HEARD}hi", "yes"), untagged_media="first")  # fmt: skip
becomes("an item with a tag in a later message", "messages",
        lines(MEDIA | {"messages": [*TURNS, {"role": "user", "content": "so<audio>"}, TURNS[1]]}),
        chat("hi", "yes", f"so{HEARD}", "yes"), untagged_media="first")  # fmt: skip
refused("fewer tags than items", lines({"messages": [{"role": "user", "content": "<audio>hi"}, TURNS[1]],
        "audios": ["2.toy"] * 2}), "<audio> occurs 1 times", untagged_media="first")  # fmt: skip
refused("an item that the model draws, without a tag", lines({"messages": TURNS, "tone": "2.toy"}),
        "<tone> occurs 0 times", untagged_media="first")  # fmt: skip
refused("an item in another folder", lines({"messages": [{"role": "user", "content": "<audio>hi"}, TURNS[1]],
        "audios": ["gone/2.toy"]}), "set data.sources.0.media_dir")  # fmt: skip
URL = {"url": "2.toy", "detail": "auto"}
ASKS = [{"type": "audio_url", "audio_url": URL}, {"type": "text", "text": "hi"}]
becomes("an item of OpenAI's API with detail auto", "messages",
        lines({"messages": [{"role": "user", "content": ASKS}, TURNS[1]]}), chat(f"{HEARD}hi", "yes"))  # fmt: skip
refused(
    "a caption of what the model does not read",
    lines({"depth": "2.toy", "caption": "so"}),
    "`messages`, `conversations` and `text`",
)
refused("a caption and an unused field", lines(MEDIA | {"caption": "so", "mood": "x"}), "`mood` is not used")
