"""Serving requests on GPUs that lend memory to each other: traces, presets, the bound, and one instance's steps.

Pure: virtual and real time alike come in as arguments, so that `ema replay` and `ema demo` share every rule.
"""
