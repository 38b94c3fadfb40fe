"""Write `examples/data/tiny`: stories and sums as text, chat and preference rows, and a byte-level BPE tokenizer.

    python examples/make_tiny_data.py examples/data/tiny

The files are in the repository, so the examples run on a fresh clone. This script documents how they were generated.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NAMES = ["Ada", "Ben", "Chen", "Dina", "Emil", "Fatou", "Goran", "Hana"]
PLACES = ["the market", "the harbour", "the old mill", "the library", "the workshop"]
THINGS = ["apples", "ropes", "lamps", "books", "nails", "bowls", "maps"]
REPLIES = ["That makes {}.", "It is {}.", "{}, if I counted right.", "The answer is {}."]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def stories(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield stories with a running count. Their lengths vary widely, as those of real text."""
    while True:
        name, thing, count = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9)
        lines = [f"{name} went to {rng.choice(PLACES)} with {count} {thing}."]
        for _ in range(min(40, int(rng.lognormvariate(1.2, 0.9)))):
            change = rng.randint(1, 5)
            if count > change and rng.random() < 0.5:
                count -= change
                lines.append(f"{rng.choice(NAMES)} asked for {change}, so {count} {thing} were left.")
            else:
                count += change
                lines.append(f"At {rng.choice(PLACES)} there were {change} more, which made {count} {thing}.")
        lines.append(f"In the evening {name} counted {count} {thing}.")
        yield {"text": " ".join(lines)}


def conversations(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield chats with sums, one to four turns long."""
    while True:
        messages = []
        for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
            a, b = rng.randint(0, 20), rng.randint(0, 20)
            messages.append({"role": "user", "content": f"What is {a} plus {b}?"})
            messages.append({"role": "assistant", "content": rng.choice(REPLIES).format(a + b)})
        yield {"messages": messages}


def preferences(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield preference pairs: a short correct response is preferred to a wrong or a long one."""
    while True:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        wrong = f"It is {a + b + rng.choice([-2, -1, 1, 2])}."
        rejected = rng.choice([wrong, f"{a + b}, if I counted right."])
        prompt = [{"role": "user", "content": f"What is {a} plus {b}?"}]
        yield {"prompt": prompt, "chosen": f"It is {a + b}.", "rejected": rejected}


def write_rows(path: Path, rows: Iterator[dict[str, Any]], count: int) -> None:
    """Write the next `count` rows as JSON lines."""
    path.write_text("".join(json.dumps(next(rows)) + "\n" for _ in range(count)))


def write_tokenizer(folder: Path, texts: list[str], vocabulary: int) -> None:
    """Train a byte-level BPE tokenizer on `texts` and save it with a chat template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "stories.jsonl", stories(random.Random(0)), 1200)
    write_rows(folder / "sums.jsonl", conversations(random.Random(1)), 1200)
    write_rows(folder / "held_out.jsonl", conversations(random.Random(2)), 200)
    write_rows(folder / "preferences.jsonl", preferences(random.Random(3)), 400)
    write_rows(folder / "held_out_preferences.jsonl", preferences(random.Random(4)), 60)
    texts = (folder / "stories.jsonl").read_text().splitlines() + (folder / "sums.jsonl").read_text().splitlines()
    write_tokenizer(folder / "tokenizer", texts, vocabulary=512)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
