"""Layer 6: loads a model, runs prefill and decode, chooses tokens, assembles text, schedules requests.

One thread of an engine owns all native memory; what touches none of it (sampling, output) is plain
NumPy and Python and may be used anywhere. Knows no HTTP and no terminal. Nothing is imported here:
whoever needs a module imports that module.
"""
