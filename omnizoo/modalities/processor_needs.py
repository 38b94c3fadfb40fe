"""Packages that transformers' processor of a model needs. OmniZoo itself does not use them."""

from typing import Any

TORCHVISION = "torchvision"


def processor_packages(model_type: str) -> list[str]:
    """Return the packages that `AutoProcessor` needs for a model type, beyond the requirements of transformers.

    The image processor of most families has an implementation without torchvision, but no video processor has one.

    Args:
        model_type: The `model_type` of a model's config.json.
    """
    # Imported here, because these modules import packages that training does not need.
    import transformers
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    processor = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(model_type) or "", None)
    if processor is None:
        return []
    packages = set(missing_packages(processor))
    if not packages:
        roles = processor.get_attributes()
        backends = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {}
        has_only_torchvision = list(backends) == [TORCHVISION]
        if "video_processor" in roles or ("image_processor" in roles and has_only_torchvision):
            packages.add(TORCHVISION)
        extractor = FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type) if "feature_extractor" in roles else None
        packages.update(missing_packages(getattr(transformers, extractor or "", None)))
    return sorted(packages)


def missing_packages(processor: Any) -> list[str]:
    """Return the missing packages of a class that transformers replaced by a placeholder; none for other classes."""
    return list(getattr(processor, "_backends", ()))
