"""The demo: a simulated server whose GPUs serve a real trace, with real processes, real memory and real copies."""
