"""Media inputs and outputs of models."""
