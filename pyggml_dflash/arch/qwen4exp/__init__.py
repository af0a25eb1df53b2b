"""Qwen3.8-Flash-Next (`qwen4exp`). Layer 4."""
