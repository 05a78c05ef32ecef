"""Caches for transformers on lent memory. Needs torch and transformers; nothing else of `ema` imports it."""

from ema.transformers.cache import ElasticCache
from ema.transformers.prefix import PrefixReport, PrefixStore
from ema.transformers.report import CacheReport

__all__ = ["CacheReport", "ElasticCache", "PrefixReport", "PrefixStore"]
