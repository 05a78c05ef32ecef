"""One layer's keys and values: the older tokens as rows on neighbours, if there are any, and the others local."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

from ema import errors
from ema.transformers.rows import Rows, count_of, first, pack, rows_of, size_of

if TYPE_CHECKING:
    from ema.transformers.beyond import Beyond

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values: sequences, heads, tokens, width."""


@dataclass(frozen=True, slots=True)
class Held:
    """All that a layer is. One object, so that it is replaced at once."""

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """Of the tokens that are local."""
    rows: tuple[Rows, ...] = ()
    """The tokens before them, on neighbours. Replaced whenever other bytes are meant."""
    picks: tuple[torch.Tensor | None, ...] = ()
    """For each of the rows, which of their sequences are the sequences now; None: these, in this order."""
    beyond: "Beyond | None" = None
    """Where the rows are."""


class Layer(DynamicLayer):
    """Whatever reads its `keys` or `values` gets those of all tokens, be it that they are fetched for that."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held = Held()
        super().__init__()

    # --- what transformers looks at ---

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,  # noqa: ANN401 - as the base class has it
        **_kwargs: Any,  # noqa: ANN401
    ) -> Pair:
        """Add tokens; keys and values of all. Those on neighbours are waited for in the order of the computation.

        Raises AgentLost, DataLost, OutOfMemory.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        beyond, local, new = self.held.beyond, self.local, (key_states, value_states)
        if beyond is None:
            keys, values = every = self._join([], local, new)
        else:
            _check_gradient(*new)
            every = self._join(beyond.take(self.number), local, new)
            beyond.done(every[1][..., -key_states.shape[-2] :, :])
            keys, values = self._join([], local, new)
        self.held = replace(self.held, keys=keys, values=values)
        return every

    @property
    def keys(self) -> Any:  # noqa: ANN401 - None in an empty layer, as in the base class
        """Of all tokens. Raises AgentLost, DataLost, OutOfMemory."""
        return self.whole()[0] if self.held.rows else self.held.keys

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._come_home()
        self.held = replace(self.held, keys=keys)

    @property
    def values(self) -> Any:  # noqa: ANN401
        """Of all tokens. Raises AgentLost, DataLost, OutOfMemory."""
        return self.whole()[1] if self.held.rows else self.held.values

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._come_home()
        self.held = replace(self.held, values=values)

    def get_seq_length(self) -> int:
        """Tokens."""
        keys = self.held.keys
        return self.far + (keys.shape[-2] if keys is not None and keys.numel() else 0)

    def reset(self) -> None:
        """Begin anew."""
        self.held = Held()
        self.is_initialized = False

    def crop(self, tokens: int) -> None:
        """Remove the last `-tokens` tokens; or what else this release of transformers knows."""
        held = self.held
        if not held.rows or tokens >= 0 or held.keys is None or held.values is None:
            super().crop(tokens)
            return
        kept = max(0, self.get_seq_length() + tokens)
        if kept >= self.far:
            local = kept - self.far
            self.held = replace(held, keys=held.keys[..., :local, :], values=held.values[..., :local, :])
            return
        rows = first(held.rows, kept)
        nothing = (held.keys[..., :0, :], held.values[..., :0, :])
        self.held = Held(*nothing, rows, held.picks[: len(rows)], held.beyond if rows else None)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Of the sequences, these in this order. What is on neighbours stays as it is, and is read in this order."""
        self._pick(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences."""
        self._pick(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each sequence so many times."""
        if self.get_seq_length():
            batch = self.held.keys.shape[0]  # type: ignore[union-attr]
            self._pick(torch.arange(batch, device=self.device).repeat_interleave(repeats))

    # --- what is ours ---

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The tokens that lie on neighbours."""
        return self.held.rows

    @property
    def far(self) -> int:
        """How many these are."""
        return count_of(self.held.rows)

    @property
    def local(self) -> Pair:
        """Keys and values of the local tokens; None for both while they are elsewhere, or there are none."""
        return self.held.keys, self.held.values

    @property
    def local_bytes(self) -> int:
        """Bytes of the local tokens."""
        return sum(t.nbytes for t in (self.held.keys, self.held.values) if t is not None)

    @property
    def far_bytes(self) -> int:
        """Bytes that the other tokens' keys and values would take here."""
        picked = zip(self.held.rows, self.held.picks, strict=True)
        return sum(r.count * r.token_bytes * (r.key.shape[0] if p is None else len(p)) for r, p in picked)

    def put_local(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """These are the local tokens, wherever they were meanwhile."""
        self.held = replace(self.held, keys=keys, values=values)

    def whole(self) -> Pair:
        """Keys and values of all tokens, fetched at once where they are not local.

        Raises AgentLost, DataLost, OutOfMemory.
        """
        if (beyond := self.held.beyond) is None:
            return self.local
        try:
            return self._join(self._fetched(), self.local)
        finally:
            beyond.moved()

    def append_and_store(self, keys: torch.Tensor, values: torch.Tensor, far: int, beyond: "Beyond") -> Pair:
        """Add tokens; keys and values of all. From now on at least the first `far` of them are on neighbours.

        Raises AgentLost, DataLost, OutOfMemory: then nothing has changed.
        """
        _check_gradient(keys, values)
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        every = self._join(self._fetched(), self.local, (keys, values))
        self._store(every, 0, far, beyond)
        return every

    def store(self, far: int, beyond: "Beyond") -> None:
        """From now on at least the first `far` tokens are on neighbours. Raises AgentLost, DataLost, OutOfMemory."""
        if far > self.far:
            self._store(self.local, self.far, far, beyond)

    # --- inside ---

    def _store(self, tokens: Pair, start: int, far: int, beyond: "Beyond") -> None:
        """`tokens`: from the one with number `start` on."""
        held = self.held
        old = [t[..., self.far - start : far - start, :] for t in tokens]
        try:
            flat = pack(*old)
            local = [t[..., far - start :, :].clone(memory_format=torch.contiguous_format) for t in tokens]
        except torch.OutOfMemoryError as error:
            raise errors.OutOfMemory(
                f"{far - self.far} tokens of layer {self.number} are to be stored: {error}"
            ) from error
        beyond.store(self.number, size_of(held.rows), flat)
        rows, picks, more = held.rows, held.picks, rows_of(*old)
        if rows and picks[-1] is None and (rows[-1].key, rows[-1].value) == (more.key, more.value):
            rows = (*rows[:-1], replace(more, count=rows[-1].count + more.count))
        else:
            rows, picks = (*rows, more), (*picks, None)
        self.held = Held(local[0], local[1], rows, picks, beyond)

    def _fetched(self) -> list[Pair]:
        return self.held.beyond.fetch(self.number) if self.held.beyond is not None else []

    def _join(self, found: Sequence[Pair], *more: Pair) -> Pair:
        """All of these one after the other. `found`: of the rows, or nothing."""
        parts = [
            pair if pick is None else (pair[0].index_select(0, pick), pair[1].index_select(0, pick))
            for pair, pick in zip(found, self.held.picks, strict=False)
        ]
        keys, values = zip(*parts, *more, strict=True)
        return torch.cat(keys, -2), torch.cat(values, -2)

    def _come_home(self) -> None:
        if self.held.rows:
            self.held = Held(*self.whole())

    def _pick(self, indices: Any) -> None:  # noqa: ANN401 - whatever a tensor may be indexed with
        if not self.get_seq_length():
            return
        held, (keys, values) = self.held, self.local
        if isinstance(indices, torch.Tensor):
            indices = indices.to(self.device)
        picks = [
            (torch.arange(part.key.shape[0], device=self.device) if pick is None else pick)[indices]
            for part, pick in zip(held.rows, held.picks, strict=True)
        ]
        self.held = replace(held, keys=keys[indices, ...], values=values[indices, ...], picks=tuple(picks))


def _check_gradient(*tensors: torch.Tensor) -> None:
    if any(t.requires_grad for t in tensors):
        raise errors.BadInput("cache", "of tensors that need a gradient", "one made under torch.no_grad()")
