"""Memory drivers: one Protocol (`ema_driver.protocol`) and its implementations."""
