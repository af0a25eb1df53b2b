"""Slots and, later, snapshots: who owns the state of a sequence. Layer 5."""
