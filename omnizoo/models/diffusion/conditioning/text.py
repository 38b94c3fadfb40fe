"""Encode prompts exactly like a diffusers pipeline, by calling the pipeline's own `encode_prompt`.

Only the tokenizers and text encoders are loaded. Lengths, templates and cleaning of captions are the defaults with
which the pipeline's `__call__` calls `encode_prompt`.
"""

import ast
import inspect
import textwrap
from typing import Any

import torch

from omnizoo.config.errors import UserError
from omnizoo.models.diffusion.conditioning.components import (
    assemble_pipeline,
    component_hash,
    frozen_computation,
    load_components,
)
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder

TEXT_COMPONENTS = ("text_encoder", "tokenizer", "connectors")  # prefixes of component names
# Variables that `encode_prompt` returns -> names of our tensors. None: a function of the shape of another one.
OUTPUTS = {
    "prompt_embeds": "text",
    "prompt_attention_mask": "text_mask",
    "prompt_embeds_mask": "text_mask",
    "pooled_prompt_embeds": "pooled",
    "prompt_embeds_2": "text_2",
    "prompt_embeds_mask_2": "text_mask_2",
    "text_ids": None,
}
MAX_TOKENS = "max_sequence_length"  # argument of `encode_prompt`
UNCONDITIONAL = "negative_"  # prefix of variables for classifier-free guidance, which training does not use

Condition = dict[str, torch.Tensor]  # tensors of one sample, without a batch dimension


class TextConditioner:
    """The tokenizers and text encoders of a pipeline.

    Args:
        folder: The pipeline.
        device: Device of the text encoders.
        dtype: Precision of the text encoders; None for the precision of their files.
        max_text_tokens: Maximum number of text tokens (`max_sequence_length`); None for the default of the pipeline.
        loaded: The components, if they are loaded already.

    Example:
        >>> conditioner = TextConditioner(PipelineFolder.read("FLUX.1-dev"), torch.device("cuda"))
        >>> conditioner.encode("a cat")  # {"text": [512, 4096], "pooled": [768]}
    """

    def __init__(
        self,
        folder: PipelineFolder,
        device: torch.device,
        dtype: torch.dtype | None = None,
        max_text_tokens: int | None = None,
        loaded: dict[str, Any] | None = None,
    ) -> None:
        self.device = device
        self.key = folder.key
        self.outputs = _returned_names(folder)
        self.arguments = _default_arguments(folder.pipeline_class)
        if max_text_tokens is not None:
            if MAX_TOKENS not in self.arguments:
                raise UserError(f"data.text_tokens: {folder.class_name} has a fixed number of text tokens. Remove it.")
            self.arguments[MAX_TOKENS] = max_text_tokens
        if loaded is None:
            loaded = load_components(folder, text_components(folder), device, dtype)
        self.pipeline = assemble_pipeline(folder, loaded)

    def encode(self, prompt: str) -> Condition:
        """Return the tensors of one prompt.

        The names are `text` [tokens, width], `text_mask` [tokens] (only if some tokens are padding), `pooled` [width],
        and `text_2`, `text_mask_2` and `text_mask` for further streams of text.

        Args:
            prompt: The prompt; the empty prompt for samples whose text is dropped.
        """
        with frozen_computation(self.device):
            try:
                returned = self.pipeline.encode_prompt(prompt, device=self.device, **self.arguments)
            except NameError as error:  # diffusers imports packages for cleaning captions only if they are installed
                class_name = type(self.pipeline).__name__
                raise UserError(f"{self.key}: {class_name} needs the package {error.name}. Install it.") from error
            values = returned if isinstance(returned, tuple) else (returned,)
            tensors: Condition = {}
            for name, value in zip(self.outputs, values, strict=True):
                if name is not None and value is not None:
                    tensors[name] = value[0]  # the batch has one prompt
            return self._connect(tensors)

    def _connect(self, tensors: Condition) -> Condition:
        """Return the tensors with masks as bool, after the connectors of pipelines that have them."""
        connectors = getattr(self.pipeline, "connectors", None)
        if connectors is not None:
            side = self.pipeline.tokenizer.padding_side
            text, other, mask = connectors(tensors["text"][None], tensors["text_mask"][None], padding_side=side)
            tensors = {"text": text[0], "text_2": other[0], "text_mask": mask[0]}
        for name in ("text_mask", "text_mask_2"):
            if name in tensors:
                tensors[name] = tensors[name].bool()
                if tensors[name].all():
                    del tensors[name]
        return tensors


def text_components(folder: PipelineFolder) -> list[str]:
    """Return the names of the components that encode prompts.

    Raises:
        UserError: If there are none.
    """
    names = [name for name in folder.components if name.startswith(TEXT_COMPONENTS)]
    if not names or not hasattr(folder.pipeline_class, "encode_prompt"):
        raise UserError(f"{folder.key}: {folder.class_name} has no text encoder. Use a pipeline that encodes prompts.")
    return names


def text_hash(folder: PipelineFolder) -> dict[str, str]:
    """Return the hash of each component that encodes prompts, keyed by component name."""
    return {name: component_hash(folder.component(name)) for name in text_components(folder)}


def _default_arguments(pipeline_class: Any) -> dict[str, Any]:
    """Return the arguments of `encode_prompt` whose defaults are in `__call__`, without classifier-free guidance."""
    parameters = inspect.signature(pipeline_class.encode_prompt).parameters
    defaults = {name: p.default for name, p in inspect.signature(pipeline_class.__call__).parameters.items()}
    arguments = {name: defaults[name] for name in parameters if name in defaults and name not in ("self", "prompt")}
    if "do_classifier_free_guidance" in parameters:
        arguments["do_classifier_free_guidance"] = False
    return arguments


def _returned_names(folder: PipelineFolder) -> list[str | None]:
    """Return the names of our tensors in the order in which `encode_prompt` returns them.

    They are read from its `return` statement, so that another order in another version of diffusers swaps no tensors.
    """
    source = textwrap.dedent(inspect.getsource(folder.pipeline_class.encode_prompt))
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    value = statements[-1].value if statements else None
    variables = [ast.unparse(element) for element in value.elts] if isinstance(value, ast.Tuple) else []
    if isinstance(value, ast.Name):
        variables = [value.id]
    unknown = [name for name in variables if name not in OUTPUTS and not name.startswith(UNCONDITIONAL)]
    if not variables or unknown:
        raise UserError(
            f"{folder.key}: {folder.class_name}.encode_prompt returns {', '.join(unknown) or 'no named tensors'}, "
            f"which is not supported. Supported are {', '.join(OUTPUTS)}."
        )
    return [OUTPUTS.get(name) for name in variables]
