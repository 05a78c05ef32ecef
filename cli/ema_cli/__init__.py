"""The `ema` command: a node or a laptop, and later a cluster."""
