"""Read the noise of a diffusion model from the config of its scheduler in diffusers.

The scheduler of a pipeline is made for sampling, and its tables change with the number of steps. Training therefore
computes the noise share itself, from the numbers in the config.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.modalities.frozen_tokenizer import diffusers_package
from omnizoo.ops.noise_schedule import DynamicShift, NoiseSchedule, Prediction

PREDICTIONS: dict[str, Prediction] = {
    "flow_prediction": "flow",
    "epsilon": "epsilon",
    "v_prediction": "v",
}


def read_noise_schedule(
    class_name: str,
    fields: Mapping[str, Any],
    key: str,
    prediction: Prediction | None = None,
    shift: float | None = None,
) -> NoiseSchedule:
    """Return the noise that a model is trained with.

    Args:
        class_name: Class of the scheduler.
        fields: Content of scheduler_config.json.
        key: Config key of the model, for messages.
        prediction: What the model predicts; None for what the scheduler says.
        shift: Shift of flow matching; None for that of the scheduler.

    Raises:
        UserError: If the prediction of the scheduler is not supported, or `shift` does not apply.
    """
    kind = prediction or _prediction(class_name, fields, key)
    if kind == "flow":
        return NoiseSchedule("flow", _shift(fields) if shift is None else shift)
    if shift is not None:
        raise UserError(f"train.losses: shift applies to flow matching, but the model predicts {kind}. Remove shift.")
    return NoiseSchedule(kind, signal_shares=_signal_shares(class_name, fields))


def _prediction(class_name: str, fields: Mapping[str, Any], key: str) -> Prediction:
    """Return what a model predicts."""
    if class_name.startswith("FlowMatch") or fields.get("use_flow_sigmas"):
        return "flow"
    name = fields.get("prediction_type", "epsilon")
    if name not in PREDICTIONS:
        raise UserError(
            f"{key}: scheduler_config.json: prediction_type {name!r} is not supported; expected one of "
            f"{', '.join(PREDICTIONS)}. To choose another one, set prediction in the options of denoise."
        )
    return PREDICTIONS[name]


def _shift(fields: Mapping[str, Any]) -> float | DynamicShift:
    """Return the shift of flow matching."""
    if fields.get("use_dynamic_shifting"):
        return DynamicShift(
            base_shift=fields.get("base_shift", 0.5),
            max_shift=fields.get("max_shift", 1.15),
            base_tokens=fields.get("base_image_seq_len", 256),
            max_tokens=fields.get("max_image_seq_len", 4096),
            is_exponential=fields.get("time_shift_type", "exponential") == "exponential",
        )
    return float(fields.get("flow_shift") or fields.get("shift") or 1.0)


def _signal_shares(class_name: str, fields: Mapping[str, Any]) -> Sequence[float]:
    """Return the squared share of the data at each time, as the scheduler computes it from its config."""
    scheduler = getattr(diffusers_package(class_name), class_name).from_config(dict(fields))
    shares: list[float] = scheduler.alphas_cumprod.double().tolist()
    return tuple(shares)
