"""The drafter: model, features of the policy, training, checkpoints."""

from .configuration_drafter import DrafterConfig
from .drafter_trainer import DrafterTrainer, DrafterTrainingArguments
from .features import FeatureBuffer, FeatureRecorder, FeatureSample
from .modeling_drafter import Drafter
from .vocabulary import most_frequent_token_ids


__all__ = [
    "Drafter",
    "DrafterConfig",
    "DrafterTrainer",
    "DrafterTrainingArguments",
    "FeatureBuffer",
    "FeatureRecorder",
    "FeatureSample",
    "most_frequent_token_ids",
]
