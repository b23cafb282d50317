"""Tensor parallelism on the CPU: two and three processes, gloo."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("world", [2, 3])
def test_column_and_row_parallel(world: int) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from tests import torch_parallel

    torch_parallel.spawn(world, "cpu")


def test_the_shares_make_the_whole() -> None:
    import numpy as np

    from fp4linear.torch.parallel import _share, row_shard
    from tests import reference, torch_parallel

    for k in (0, 2, 14, 16, 48, 62, 90, 232):
        for world in (1, 2, 3, 4, 7):
            layer = torch_parallel.make(6, k, k, bias=False).layer
            columns = []
            for rank in range(world):
                shard = row_shard(layer, rank, world)
                w = reference.dequantize(*shard.layer.canonical())
                assert (w[:, : shard.left] == 0).all() and (w[:, shard.left + shard.in_features :] == 0).all()
                assert w.shape[1] == shard.left + shard.in_features + shard.right
                columns.append(w[:, shard.left : shard.left + shard.in_features])
                assert shard.in_features == len(range(k)[_share(k, rank, world)])
            whole = reference.dequantize(*layer.canonical())
            assert np.array_equal(np.concatenate(columns, axis=1), whole)


def test_fused_parts_must_stay_local() -> None:
    from torch.distributed.tensor import Replicate

    from fp4linear.torch import ColumnParallel

    with pytest.raises(ValueError, match=r"parts.*local"):
        ColumnParallel(parts=(4, 4), output_layouts=Replicate())
    with pytest.raises(ValueError, match=r"parts.*local"):
        ColumnParallel(parts=(4, 4), use_local_output=False)
