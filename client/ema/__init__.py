"""EMA client: borrow memory of idle GPUs in the same server."""
