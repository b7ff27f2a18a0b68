"""Converts Hugging Face checkpoints of Mixture-of-Experts models into folders that moejax reads."""
