"""Models: weights, tokenizers and the transformer behind a `Target`."""
