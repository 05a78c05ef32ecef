"""torch on lent memory. Needs torch; nothing else of `ema` imports it."""
