"""The pure core of EMA: amounts, state, policy, API models and wire messages. No I/O, no clock."""
