"""The work-arounds are needed, and they work. That of the distributed optimizer is in test_training.py: it needs two
runs."""

import itertools

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.common.embeddings import rope_utils

from qla_megatron.recipes import upstream
from qla_megatron.testing.distributed import run_ranks


def test_start_up_does_not_look_for_a_makefile(monkeypatch: pytest.MonkeyPatch, capfd: object) -> None:
    monkeypatch.setattr(utils, "compile_helpers", utils.compile_helpers)
    with pytest.raises(SystemExit):
        utils.compile_helpers()
    upstream._skip_missing_makefile()
    utils.compile_helpers()


def test_synchronous_save_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    upstream._save_without_manager_process()
    results = filesystem_async.get_write_results_queue()
    assert not hasattr(results, "_manager")  # the proxy of a manager process has one
    results.put(1)
    assert results.get() == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_rotary_embedding_is_megatrons(ranks: int) -> None:
    run_ranks(_check_rotation, ranks, context_parallel=ranks)


def _check_rotation() -> None:
    group = parallel_state.get_context_parallel_group()
    generator = torch.Generator().manual_seed(0)
    for lengths in ([64], [8, 24, 0, 32], [4] * 16, [0, 60, 4, 0]):  # one document, empty ones, many short ones
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        tokens = torch.randn(64 // group.size(), 3, 16, generator=generator)
        for positions in (max(lengths), 100, 64):  # angles of the longest document, of more, of the whole pack
            angles = torch.randn(positions, 1, 1, 8, generator=generator)
            for interleaved in (False, True)[: 1 + all(lengths)]:  # Megatron cannot interleave an empty document
                expected = rope_utils._apply_rotary_pos_emb_thd(tokens, offsets, angles, interleaved, cp_group=group)
                assert torch.equal(
                    upstream.rotate_packed(tokens, offsets, angles, interleaved, cp_group=group), expected
                )
    on_no_device = (t.to("meta") for t in (tokens, offsets, angles))
    assert upstream.rotate_packed(*on_no_device, cp_group=group).shape == tokens.shape  # reads no value on the host
    with pytest.raises(ValueError, match="cp_group must be given"):
        upstream.rotate_packed(tokens, offsets, angles)
    upstream.apply()
    assert rope_utils._apply_rotary_pos_emb_thd is upstream.rotate_packed
