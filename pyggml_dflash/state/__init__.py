"""Slots, snapshots and the prefix cache: who owns the state of a sequence. Layer 5."""
