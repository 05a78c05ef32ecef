"""NVIDIA GPUs through the CUDA driver, with NVML beside it where it answers.

What to know of it:

- Nothing of CUDA is imported before a session is opened, and a session without a usable driver is `DriverUnavailable`.
- The GPU runs streams of one process independently only while each has a hardware queue of its own: 8 per GPU by
  default, 32 with `CUDA_DEVICE_MAX_CONNECTIONS=32`, which a node's session sets unless it is set already. One stream
  more than that, blocked in a wait, would hold up others. So a process has that many streams per GPU and no more; let
  at most 24 of them wait for clients.
- CUDA cannot drop queued work. A stream that is closed with work queued is parked until that work has run.
- Sessions of one process share its CUDA contexts: an error that costs one session (`ContextLost`) costs all of them.
- Host memory is memory of the NUMA node beside the first GPU.
"""

from ema_driver.cuda.session import CudaDriver

__all__ = ["CudaDriver"]
