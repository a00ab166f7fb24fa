"""How heads and columns of a model are cut for the ranks of a tensor-parallel group."""

from __future__ import annotations

import pytest

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models.share import Cut, Share


def test_every_head_and_column_belongs_to_one_rank() -> None:
    for count in range(1, 8):
        shares = [Share(rank, count) for rank in range(count)]
        cuts = [share.of(80, "columns") for share in shares]
        assert [element for cut in cuts for element in range(cut.start, cut.stop)] == list(range(80))
    for num_heads, num_kv_heads, count in ((9, 3, 2), (9, 3, 3), (9, 3, 5), (8, 1, 3), (6, 6, 4), (6, 2, 6)):
        heads = [Share(rank, count).heads(num_heads, num_kv_heads) for rank in range(count)]
        assert [head for queries, _ in heads for head in range(queries.start, queries.stop)] == list(range(num_heads))
        for queries, kv in heads:
            read = {head * num_kv_heads // num_heads for head in range(queries.start, queries.stop)}
            assert read == set(range(kv.start, kv.stop))
            assert queries.size % kv.size == 0


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel: 1 of the model's 2 attention heads cannot be cut into 2"):
        Share(0, 3).heads(2, 2)
    with pytest.raises(ConfigError, match="--tensor-parallel: 3 of the model's 3 columns cannot be cut into 4"):
        Share(0, 4).of(3, "columns")
    assert Share(1, 2).of(3, "columns") == Cut(1, 3, 3)
