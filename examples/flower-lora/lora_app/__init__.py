"""A Flower app that fine-tunes the adapters of a causal language model."""
