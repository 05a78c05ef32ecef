"""Caches for transformers on lent memory. Needs torch and transformers; nothing else of `ema` imports it."""

from ema.transformers.cache import ElasticCache
from ema.transformers.prefix import PrefixReport, PrefixStore

__all__ = ["ElasticCache", "PrefixReport", "PrefixStore"]
