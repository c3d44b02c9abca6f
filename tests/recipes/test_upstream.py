"""The work-arounds are needed, and they work. That of the distributed optimizer is in test_training.py: it needs two
runs."""

import pytest
from megatron.core.datasets import utils
from megatron.core.dist_checkpointing.strategies import filesystem_async

from qla_megatron.recipes import upstream


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
