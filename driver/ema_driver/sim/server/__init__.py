"""The device process: it owns every simulated GPU, runs all streams and accounts for all memory, in one loop."""
