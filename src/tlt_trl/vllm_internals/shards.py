"""Which slice of a weight a rank of a tensor-parallel engine holds, computed without what the rank believes it is."""

from dataclasses import dataclass

import torch

from .contract import UnsupportedEngineError


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """
    Place of this process in its tensor-parallel group.

    Attributes:
        rank (`int`):
            From 0.
        num_ranks (`int`):
            1 without tensor parallelism.
    """

    rank: int = 0
    num_ranks: int = 1

    def slice_of(self, tensor: torch.Tensor, layer: torch.nn.Module, part: int | None) -> torch.Tensor:
        """
        The part of a full tensor that belongs into a layer of this rank.

        Args:
            tensor (`torch.Tensor`):
                As it is in a checkpoint.
            layer (`torch.nn.Module`):
                The layer of the engine; only its sizes are read, not its own idea of the rank.
            part (`int`, *optional*):
                Index of the tensor among the outputs of a fused layer.
        """
        from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        if self.num_ranks == 1:
            return tensor
        if isinstance(layer, VocabParallelEmbedding):
            rows = layer.num_embeddings_per_partition
            return tensor[self.rank * rows : (self.rank + 1) * rows]  # fewer on the last rank, which is padded
        if not isinstance(layer, LinearBase):
            return tensor
        sizes = layer.output_partition_sizes
        if part is None and len(sizes) > 1:
            raise UnsupportedEngineError(
                "This policy's checkpoint has a fused layer, whose slices in a tensor-parallel engine cannot be "
                "compared. Set `vllm_verify_weight_sync=False` to go without."
            )
        tensor = self._along(0, sizes[part or 0], tensor)
        if isinstance(layer, RowParallelLinear) and tensor.dim() == 2:
            tensor = self._along(1, layer.input_size_per_partition, tensor)
        return tensor

    def _along(self, dim: int, size: int, tensor: torch.Tensor) -> torch.Tensor:
        """
        The slice of that size. There are as many as ranks, one that all ranks hold or, where key-value heads are fewer
        than ranks, one for several neighbours.
        """
        num_slices = tensor.shape[dim] // size
        return tensor.narrow(dim, self.rank * num_slices // self.num_ranks * size, size)
