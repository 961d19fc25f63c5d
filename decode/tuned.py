"""The ``latency_specialized`` backend's operators: a bundle's kernels, and ``auto``'s where there are none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import InputError, ModelCard
from ..kernels.collectives import Collectives, SingleRank, StandIn
from ..kernels.health import check_health
from ..kernels.launch import Runner
from ..kernels.transports import Loopback, Transport
from .auto import AutoOperators
from .choices import Choice, Tuned
from .weights import KdaAttention, Mix, MlaAttention


class SavedBlocks:
    """A step's saved blocks side by side, as a kernel reads them: each is copied once, when it is first seen."""

    def __init__(self, blocks: int, rows: int, hidden: int, *, dtype: torch.dtype, device: str | torch.device) -> None:
        """``rows``: those that the kernel was compiled for."""
        self._memory = torch.zeros(blocks, rows, hidden, dtype=dtype, device=device)
        self._held: list[Tensor] = []

    def forget(self) -> None:
        """A step begins: what is copied in it may be captured, whatever another step had copied before."""
        self._held = []

    def side_by_side(self, blocks: Sequence[Tensor]) -> Tensor:
        """[all that may be saved, rows, hidden], the first of them ``blocks``; the same objects are not copied again."""
        same = 0
        while same < min(len(blocks), len(self._held)) and blocks[same] is self._held[same]:
            same += 1
        for place in range(same, len(blocks)):
            self._memory[place, : blocks[place].shape[0]].copy_(blocks[place])
        self._held = [*self._held[:same], *blocks[same:]]
        return self._memory


class TunedOperators(AutoOperators):
    """See :class:`~k3lab.decode.operators.Operators`; runs on a GPU.

    Kernels are loaded at construction; a call binds its tensors, which the launches hold. In a captured
    graph binding happens once, at capture.
    """

    name = "latency_specialized"

    def __init__(
        self,
        card: ModelCard,
        choices: Sequence[Choice],
        *,
        dtype: torch.dtype,
        device: str | torch.device,
        k_scale: float = 1.0,
        transport: Transport | None = None,
    ) -> None:
        """Load the kernels.

        Args:
            card: the model.
            choices: of :func:`~k3lab.decode.choices.choose`; those that are tuned are loaded.
            dtype: of the model.
            device: the GPU.
            k_scale: of an FP8 MLA cache.
            transport: of kernels that write to other ranks; without one this rank is alone, and what the others would
                send counts as zero, as stand-in collectives have it.
        """
        super().__init__(card, dtype=dtype, device=device, k_scale=k_scale)
        self._alone = transport is None
        tuned = [choice for choice in choices if isinstance(choice, Tuned)]
        self._projection = {
            choice.kind: Runner(choice.compiled, str(device))
            for choice in tuned
            if choice.family == "attention_projection"
        }
        self._output = {
            choice.kind: Runner(choice.compiled, str(device), transport or Loopback.alone(choice.compiled.problem.tp))
            for choice in tuned
            if choice.family == "output_projection"
        }
        # an entry for more rows serves this step, and its kernels have those in their strides
        self._compiled_for = {choice.kind: choice.place[3] for choice in tuned if choice.family == "output_projection"}
        most = (card.num_attn_res_blocks, card.hidden_size)
        self._saved = {
            rows: SavedBlocks(most[0], rows, most[1], dtype=dtype, device=device)
            for rows in set(self._compiled_for.values())
        }

    def attention_projection(self, x: Tensor, attention: KdaAttention | MlaAttention) -> Tensor:
        """The bundle's kernel of the layer's kind, or ``auto``'s GEMM."""
        runner = self._projection.get("kda" if isinstance(attention, KdaAttention) else "mla")
        if runner is None:
            return super().attention_projection(x, attention)
        out = torch.empty(x.shape[0], attention.in_proj.shape[0], dtype=x.dtype, device=x.device)
        call = runner.bind({"x": x.contiguous(), "w": attention.in_proj, "out": out}, rows=x.shape[0])
        call()
        return out

    def output_projection(
        self,
        x: Tensor,
        attention: KdaAttention | MlaAttention,
        prefix: Tensor | None,
        blocks: Sequence[Tensor],
        mix: Mix,
        comm: Collectives,
    ) -> tuple[Tensor, Tensor]:
        """The bundle's kernels of the layer's kind, or of one that restarts the residual; else ``auto``'s operators.

        Raises:
            InputError: this rank was set up alone, and the group is a real one.
        """
        kind = "restart" if prefix is None else "kda" if isinstance(attention, KdaAttention) else "mla"
        if prefix is None and len(blocks) == 1:
            for memory in self._saved.values():
                memory.forget()
        runner = self._output.get(kind)
        if runner is None or not blocks:
            return super().output_projection(x, attention, prefix, blocks, mix, comm)
        if self._alone and not isinstance(comm, SingleRank | StandIn):
            raise InputError(f"a group of {comm.size} ranks needs a transport; these kernels were set up for one alone")
        saved = self._saved[self._compiled_for[kind]].side_by_side(blocks)
        new, following = (torch.empty(x.shape[0], saved.shape[2], dtype=x.dtype, device=x.device) for _ in range(2))
        tensors = {
            "x": x.contiguous(), "w_o": attention.o_proj, "blocks": saved, "res_norm": mix.res_norm, "res_proj": mix.res_proj,
            "norm_w": mix.norm, "prefix_out": new, "mlp_input": following,
        }  # fmt: skip
        if prefix is not None:
            tensors["prefix"] = prefix.contiguous()
        runner.bind(tensors, rows=x.shape[0], fewer={"blocks": len(blocks)})()
        return new, following

    def check(self) -> None:
        """See :class:`~k3lab.decode.operators.Operators`."""
        for runner in self._output.values():
            check_health(runner.buffers, runner.transport.rank)
