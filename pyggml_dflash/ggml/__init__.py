"""The door to ggml: its files, devices, tensors, operations and graphs. Layer 1.

Only modules of this package may import the built cffi module. They know bytes, shapes and
element types; models and tokens belong to the layers above.
"""
