"""The policy: who may hold how much of which lender's memory, and what to do now to get there.

`plan` looks at one node and says what to move, drop and grant; `apply` says what the node is after that was done. Both
are pure and deterministic: the agent, the operator and replay in virtual time call the same two functions.
"""

from ema_core.policy.apply import apply
from ema_core.policy.lendable import lendable
from ema_core.policy.plan import plan

__all__ = ["apply", "lendable", "plan"]
