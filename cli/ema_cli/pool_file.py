"""pool.yaml on disk."""

from pathlib import Path

import yaml

from ema_core.api import MemoryPool, load_pools
from ema_core.errors import InvalidInput

LARGEST = 1 << 20
"""Bytes of a pool file at most."""


def read_pools(path: Path) -> list[MemoryPool]:
    """The MemoryPools of a YAML file, at least one. Raises InvalidInput."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput.of("pool", str(path), f"a readable file ({error.strerror})") from error
    if len(text) > LARGEST:
        raise InvalidInput.of("pool", str(path), f"a file of at most {LARGEST} bytes")
    try:
        documents = [document for document in yaml.safe_load_all(text.decode("utf-8")) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: bad UTF-8, dates, numbers
        raise InvalidInput.of(str(path), str(error), "a YAML document") from error
    if any(isinstance(document, dict) and "gpus" in document and "kind" not in document for document in documents):
        raise InvalidInput.of(
            str(path), "simulated GPUs", "a MemoryPool; `ema up --driver sim --sim FILE` reads simulated GPUs"
        )
    return load_pools(documents)


def read_pool(path: Path) -> MemoryPool:
    """The one MemoryPool of a YAML file. Raises InvalidInput."""
    pools = read_pools(path)
    if len(pools) != 1:
        raise InvalidInput.of(str(path), len(pools), "just one MemoryPool")
    return pools[0]
