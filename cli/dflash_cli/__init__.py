"""The command line of pyggml_dflash. Layer 9: parses, calls one engine method, prints.

Nothing is imported here; `main` imports a command's module when the command is called.
"""
