"""Sequence classification models of transformers: a linear layer scores the last token of each sample.

Their weights have the same names as in the language model, but `score` replaces the language model head. The forward of
transformers scores only the last token of its input. OmniZoo replaces it to score every token of a pack.
"""

from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import SequenceClassifierOutput

from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ScoreHead
from omnizoo.models.hf_private import SEQUENCE_CLASSIFICATION, classification_class, has_score_head

HEAD = "score"  # attribute of transformers' classes that contains the score head
LANGUAGE_HEAD = "*lm_head*"  # weights of the head that a score head replaces
PROBLEMS: dict[str, Any] = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
}  # in config.json


def describe_score_head(config: PretrainedConfig, head: ScoreHead, key: str) -> None:
    """Change a config so that it describes a sequence classification model with the labels of `head`.

    Raises:
        UserError: If transformers has no such model of the family, or the config already has other labels.
    """
    model_class = classification_class(config)
    if model_class is None:
        raise UserError(
            f"{key}: transformers has no sequence classification model of type `{config.model_type}`, which the loss "
            "needs. Use another model family."
        )
    if has_score_head(config):
        published = [str(label) for _, label in sorted((config.id2label or {}).items())]
        is_unnamed = published == [f"LABEL_{i}" for i in range(len(published))]
        same_names = published == list(head.labels) or is_unnamed or head.problem == "reward"
        if len(published) != len(head.labels) or not same_names:
            raise UserError(
                f"{key}: its scores are {', '.join(published)}, but the loss has {', '.join(head.labels)}. Use the "
                "same labels in the same order."
            )
    config.architectures = [model_class.__name__]
    config.id2label = dict(enumerate(head.labels))
    config.label2id = {label: i for i, label in enumerate(head.labels)}
    config.problem_type = PROBLEMS.get(head.problem)


def use_score_head(model: nn.Module) -> None:
    """Make a sequence classification model score all tokens. Other models stay unchanged."""
    if not isinstance(model, PreTrainedModel) or not type(model).__name__.endswith(SEQUENCE_CLASSIFICATION):
        return
    if not isinstance(getattr(model, HEAD, None), nn.Linear):
        raise UserError(f"model: {type(model).__name__} has no linear layer `{HEAD}`. Use another model family.")
    # Use bound methods: in a deep copy of the model, these methods refer to the copy.
    model.forward = MethodType(_score_tokens, model)
    model.get_output_embeddings = MethodType(_score_head, model)  # type: ignore[method-assign]


def _score_head(model: PreTrainedModel) -> nn.Module:
    """Return the score head."""
    return model.get_submodule(HEAD)


def _score_tokens(model: PreTrainedModel, **inputs: Any) -> SequenceClassifierOutput:
    """Return the scores of all tokens, `[1, tokens, labels]`."""
    hidden = model.base_model(**inputs).last_hidden_state
    return SequenceClassifierOutput(logits=_score_head(model)(hidden))


def replaced_weights(published: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return patterns of missing and of unexpected weights, for a folder whose language model head is replaced.

    Args:
        published: The config.json of the folder. If it has a score head, nothing is replaced, and both lists are empty.
    """
    architectures = published.get("architectures") or ()
    if any(str(name).endswith(SEQUENCE_CLASSIFICATION) for name in architectures):
        return [], []
    return [f"{HEAD}.*"], [LANGUAGE_HEAD]


def set_padding(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the padding token of a sequence classification model, if its config lacks one.

    transformers needs it to find the last token of each text in a batch. A padding token that also ends texts is not
    suitable, because the model would score the wrong token.
    """
    text = config.get_text_config()
    padding = tokenizer.pad_token_id
    if has_score_head(config) and text.pad_token_id is None and padding != tokenizer.eos_token_id:
        text.pad_token_id = padding
