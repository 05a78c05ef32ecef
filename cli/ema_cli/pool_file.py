"""pool.yaml on disk."""

from pathlib import Path

import yaml

from ema_core.api import MemoryPool, load_pools
from ema_core.errors import InvalidInput


def read_pool(path: Path) -> MemoryPool:
    """The one MemoryPool of a YAML file. Raises InvalidInput."""
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text("utf-8")) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: bad UTF-8, dates, numbers
        raise InvalidInput.of(str(path), str(error), "a YAML document") from error
    except OSError as error:
        raise InvalidInput.of("--pool", str(path), f"a readable file ({error.strerror})") from error
    pools = load_pools(documents)
    if len(pools) != 1:
        raise InvalidInput.of(str(path), len(pools), "just one MemoryPool")
    return pools[0]
