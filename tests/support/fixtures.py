"""A small byte-level BPE tokenizer, trained when a test needs it and saved as a Hugging Face folder."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
TEXT = """A pack holds samples of many rows, and every sample sees only itself. The order of packs is the same for
any number of ranks: one process, two, four or eight. What is the capital of France? The capital of France is Paris.
user assistant system tool think question answer 0 1 2 3 4 5 6 7 8 9, and so on; (yes) [no] {maybe} <tag> "quoted"."""


def make_tokenizer(
    folder: Path,
    chat_template: str | None = CHATML,
    vocab_size: int = 512,
    bos: str | None = None,
    special_tokens: tuple[str, ...] = (),
    trim_offsets: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer and save it to `folder`. It puts `bos` before every text, as the tokenizer of Llama does."""
    specials = list(dict.fromkeys([*SPECIAL_TOKENS, *special_tokens, *([bos] if bos else [])]))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        steps.append(processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]))
    tokenizer.post_processor = processors.Sequence(steps)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        **({"bos_token": bos} if bos else {}),
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)
