"""What a rank remembers between steps: paged MLA rows, KDA states, convolution history, context lengths.

Every request owns a slot. KDA state and history are kept after every token of the last step (at most
``max_verify``), and the next step reads the snapshot of the last accepted token: rolling back a verify
step is choosing another snapshot. MLA rows of rejected tokens are simply overwritten, because rows at
or beyond the context length are never read. Lengths and block tables are kept on the host, for
allocation, and on the device, for the step; nothing here reads back from the device.

A captured step has a fixed number of rows; where fewer requests run, the padding slot stands in for the
missing ones: it has memory of its own, is never admitted, and its context stays empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels import InputError, ModelCard


class DecodeCache:
    """Caches of one rank for up to ``max_requests`` requests.

    Attributes:
        kda_states: per KDA layer [requests, verify, h/T, V, K], FP32 (FP64 in an FP64 model).
        kda_convs: per KDA layer [requests, verify, W-1, 3hD/T], raw projections in the model's dtype.
        kda_pools: per KDA layer history and state as kernels index them, [1 + requests * verify, ...]; entry 0 is nobody's.
        mla: per MLA layer [blocks, block_size, kv_lora + rope], BF16, FP8 E4M3 or FP64.
        block_table: [requests, blocks a request], int32; unused entries point at block 0.
        context: [requests], int32, accepted tokens.
        snapshot: [requests], int64, which snapshot the next step starts from.
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        tp: int = 1,
        max_requests: int,
        max_context: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
        max_verify: int = 1,
        block_size: int = 16,
        blocks: int | None = None,
        padding: bool = False,
        dcp: int = 1,
        device: str | torch.device = "cpu",
    ) -> None:
        """Allocate; ``blocks`` defaults to enough for every request at ``max_context``. ``padding``: with a padding slot.

        ``dcp``: ranks that share each context, token t with rank t % dcp, there as number t // dcp. Above 1 the last page is
        nobody's: PyTorch operators, whose shapes must not depend on who holds a token, put there what other ranks hold.

        Raises:
            InputError: a size below 1, or TP does not divide.
        """
        card.check_tp(tp)
        sizes = {
            "max_requests": max_requests,
            "max_context": max_context,
            "max_verify": max_verify,
            "block_size": block_size,
            "blocks": 1 if blocks is None else blocks,
            "dcp": dcp,
        }
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"{name} is {size}, must be at least 1")
        self.card, self.tp = card, tp
        self.max_requests, self.max_context, self.max_verify = max_requests, max_context, max_verify
        self.block_size, self.dcp = block_size, dcp
        per_request = -(-max_context // (dcp * block_size))
        self.blocks = max_requests * per_request if blocks is None else blocks
        heads, dim = card.kda_num_heads // tp, card.kda_head_dim
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        kinds = list(enumerate(card.layer_kinds))
        slots = max_requests + padding
        history, state = (card.kda_conv_size - 1, 3 * heads * dim), (heads, dim, dim)

        def pool(shape: tuple[int, ...], kept: torch.dtype) -> torch.Tensor:
            return torch.zeros(1 + slots * max_verify, *shape, dtype=kept, device=device)

        self.kda_pools = {
            layer: (pool(history, dtype), pool(state, state_dtype)) for layer, kind in kinds if kind == "kda"
        }
        self.kda_convs, self.kda_states = (
            {layer: pools[which][1:].unflatten(0, (slots, max_verify)) for layer, pools in self.kda_pools.items()}
            for which in (0, 1)
        )
        row = card.kv_lora_rank + card.qk_rope_head_dim
        spare = min(-(-max_verify // block_size), per_request) if padding else 0
        self.mla = {
            layer: torch.zeros(
                self.blocks + spare + (dcp > 1), block_size, row, dtype=cache_dtype or dtype, device=device
            )
            for layer, kind in kinds
            if kind == "mla"
        }
        self.block_table = torch.zeros(slots, per_request, dtype=torch.int32, device=device)
        self.context = torch.zeros(slots, dtype=torch.int32, device=device)
        self.snapshot = torch.zeros(slots, dtype=torch.int64, device=device)
        self.padding = max_requests if padding else None
        if padding:
            self.block_table[max_requests, :spare] = torch.arange(self.blocks, self.blocks + spare, dtype=torch.int32)
        self._free_blocks = list(range(self.blocks - 1, -1, -1))
        self._owned: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        self._spoiled: set[int] = set()

    # -- requests -----------------------------------------------------------------------------
    @property
    def slots(self) -> tuple[int, ...]:
        """Slots in use, ascending."""
        return tuple(sorted(self._lengths))

    @property
    def free_blocks(self) -> int:
        """MLA blocks nobody owns."""
        return len(self._free_blocks)

    def length(self, slot: int) -> int:
        """Accepted tokens of a request."""
        self._known(slot)
        return self._lengths[slot]

    def _known(self, slot: int) -> None:
        if slot not in self._lengths:
            raise InputError(f"slot {slot} holds no request; slots in use: {', '.join(map(str, self.slots)) or 'none'}")

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        """MLA blocks a request owns, in the order of its tokens."""
        self._known(slot)
        return tuple(self._owned[slot])

    def add(self) -> int:
        """Admit a request with an empty context; returns its slot.

        Raises:
            InputError: every slot is taken.
        """
        free = [slot for slot in range(self.max_requests) if slot not in self._lengths]
        if not free:
            raise InputError(
                f"the cache is full: it holds {self.max_requests} requests; release one or make max_requests larger"
            )
        slot = free[0]
        self._lengths[slot], self._owned[slot] = 0, []
        self.forget(slot)
        return slot

    def forget(self, slot: int) -> None:
        """Back to an empty context; the request keeps its slot and its blocks."""
        self._known(slot)
        self._lengths[slot] = 0
        self._pending.pop(slot, None)
        self._spoiled.discard(slot)
        self.context[slot] = 0
        self.snapshot[slot] = 0
        for buffers in (self.kda_states, self.kda_convs):
            for buffer in buffers.values():
                buffer[slot, 0].zero_()

    def release(self, slot: int) -> None:
        """Forget a request and take its blocks back."""
        self._known(slot)
        self._free_blocks.extend(reversed(self._owned.pop(slot)))
        self._lengths.pop(slot)
        self._pending.pop(slot, None)
        self._spoiled.discard(slot)
        self.block_table[slot].zero_()

    # -- a step -------------------------------------------------------------------------------
    def reserve(self, slots: Sequence[int], tokens: int) -> None:
        """Give every request blocks for ``tokens`` more tokens; all of them or none.

        Raises:
            InputError: a context would exceed ``max_context``, or the blocks do not suffice.
        """
        wanted: dict[int, int] = {}
        for slot in slots:
            self._known(slot)
            length = self._lengths[slot] + tokens
            if length > self.max_context:
                raise InputError(
                    f"the cache is full: request {slot} needs a context of {length} tokens, max_context is {self.max_context}"
                )
            wanted[slot] = -(-length // (self.dcp * self.block_size)) - len(self._owned[slot])
        need = sum(max(0, count) for count in wanted.values())
        if need > len(self._free_blocks):
            raise InputError(
                f"the cache is full: the step needs {need} more blocks of {self.block_size} tokens, {len(self._free_blocks)}"
                f" of {self.blocks} are free; release a request or make blocks larger"
            )
        for slot, count in wanted.items():
            if count > 0:
                owned = self._owned[slot]
                owned.extend(self._free_blocks.pop() for _ in range(count))
                self.block_table[slot, : len(owned)] = torch.tensor(owned, dtype=torch.int32)

    def begin(self, slots: Sequence[int], q_len: int) -> None:
        """Host side of a step of ``q_len`` tokens a request: checks, and blocks for the new rows.

        Raises:
            InputError: no request, one twice, one with an unaccepted or failed step, ``q_len`` out of range, or full.
        """
        if not slots or len(set(slots)) != len(slots):
            raise InputError(f"a step needs one or more different requests, not slots {list(slots)}")
        if not 1 <= q_len <= self.max_verify:
            raise InputError(
                f"a step of {q_len} tokens a request: this cache keeps snapshots for 1 to {self.max_verify}"
            )
        self.ready(slots)
        self.reserve(slots, q_len)
        self._pending.update(dict.fromkeys(slots, q_len))

    def begin_prefill(self, slot: int, tokens: int) -> None:
        """Host side of a prefill of ``tokens`` tokens: blocks for all of them; :meth:`prefilled` makes them count.

        Raises:
            InputError: an unaccepted or failed step, or full.
        """
        self._known(slot)
        self.ready([slot])
        self.reserve([slot], tokens)
        self._pending[slot] = tokens

    def prefilled(self, slot: int, tokens: int) -> None:
        """A chunk is written, its state in the first snapshot: its tokens count, and the next chunk goes on from there."""
        self.context[slot] += tokens
        self.snapshot[slot] = 0
        self._lengths[slot] += tokens
        self._pending[slot] -= tokens
        if not self._pending[slot]:
            del self._pending[slot]

    def ready(self, slots: Sequence[int]) -> None:
        """Raise InputError for a request whose last step failed, or is not accepted yet."""
        for slot in slots:
            if slot in self._spoiled:
                raise InputError(f"the last step of request {slot} failed half-way; forget or release it")
        waiting = [slot for slot in slots if slot in self._pending]
        if waiting:
            raise InputError(
                f"request {waiting[0]} has an unaccepted step of {self._pending[waiting[0]]} tokens; accept it first"
            )

    def spoil(self, slots: Sequence[int]) -> None:
        """A step failed half-way: some layers' snapshots are already the step's, so the requests cannot go on."""
        for slot in slots:
            self._pending.pop(slot, None)
            self._spoiled.add(slot)

    def accept(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the first ``counts[i]`` tokens of the last step of ``slots[i]``; the rest never happened.

        Raises:
            InputError: a request without a step or named twice, or a count outside 1..q_len.
        """
        if len(slots) != len(counts):
            raise InputError(f"accept got {len(slots)} requests and {len(counts)} counts; one count a request")
        if len(set(slots)) != len(slots):
            raise InputError(f"accept needs different requests, not slots {list(slots)}")
        for slot, count in zip(slots, counts, strict=True):
            if slot not in self._pending:
                raise InputError(f"request {slot} has no step to accept")
            if not 1 <= count <= self._pending[slot]:
                raise InputError(f"request {slot}: {count} accepted tokens, its step had {self._pending[slot]}")
        device = self.context.device
        self.advance(
            torch.tensor(slots, dtype=torch.int64, device=device),
            torch.tensor(counts, dtype=torch.int32, device=device),
        )
        self.note_accepted(slots, counts)

    def cut(self, slot: int, tokens: int) -> None:
        """The last ``tokens`` that a request's last step accepted never happened; some of that step's remain.

        Raises:
            InputError: a negative number, or a step that is not accepted, or did not accept more.
        """
        self.ready([slot])
        if not 0 <= tokens <= int(self.snapshot[slot]):
            raise InputError(
                f"request {slot}: {tokens} tokens cannot be cut from a step of {int(self.snapshot[slot]) + 1}"
            )
        self.context[slot] -= tokens
        self.snapshot[slot] -= tokens
        self._lengths[slot] -= tokens

    def note_accepted(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Host side of :meth:`accept`, for steps whose device side ran inside a captured graph."""
        for slot, count in zip(slots, counts, strict=True):
            self._lengths[slot] += count
            self._pending.pop(slot, None)

    def advance(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        """Device side of :meth:`accept`: int64 slots [B], int32 counts [B], 0 for the padding slot; can be captured."""
        self.context.index_add_(0, slots, counts)
        self.snapshot[slots] = counts.long().sub(1).clamp(min=0)

    # -- what the step reads and writes ---------------------------------------------------------
    def kda_places(self, slots: torch.Tensor, q_len: int) -> torch.Tensor:
        """Entries of :attr:`kda_pools`, int32 [B, 1 + q]: what a request's step starts from, and one for each of its tokens."""
        token = torch.arange(q_len, device=slots.device).expand(slots.shape[0], -1)
        which = torch.cat([self.snapshot[slots][:, None], token], dim=1)
        return (1 + slots[:, None] * self.max_verify + which).to(torch.int32)

    def kda_read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Conv history [B, W-1, 3hD/T] and state [B, h/T, V, K] after the last accepted token."""
        chosen = self.snapshot[slots]
        return self.kda_convs[layer][slots, chosen], self.kda_states[layer][slots, chosen]

    def kda_write(self, layer: int, slots: torch.Tensor, convs: torch.Tensor, states: torch.Tensor) -> None:
        """Snapshots after every token of the step: [B, q, ...]."""
        q_len = states.shape[1]
        self.kda_convs[layer][slots, :q_len] = convs
        self.kda_states[layer][slots, :q_len] = states
