"""The drafter: model, features, training, checkpoints."""
