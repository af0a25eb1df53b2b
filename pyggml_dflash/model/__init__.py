"""GGUF files, configurations, weights, and text to tokens and back. Layer 2."""
