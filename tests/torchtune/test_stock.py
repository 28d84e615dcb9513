"""Messages where EleutherAI's harness is missing, or does not go with what is installed."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import NoReturn

import pytest

from adaptive_batching._torchtune.stock import load_stock_evaluation

MODULE = "_torchtune_stock_eleuther_eval"
REMEDY = r"pip install 'adaptive-batching\[eval\]'$"


def test_a_harness_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit, match=f"error: eleuther_eval needs lm_eval, which is not installed; {REMEDY}"):
        load_stock_evaluation()


def test_a_harness_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.7")
    with pytest.raises(
        SystemExit, match=rf"error: eleuther_eval needs lm_eval 0\.4\.8 or later, and 0\.4\.7 is here; {REMEDY}"
    ):
        load_stock_evaluation()


def test_a_harness_that_cannot_be_imported_is_named_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.13")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    for module in ("lm_eval", "lm_eval.evaluator"):
        monkeypatch.setitem(sys.modules, module, None)
    for _ in range(2):
        with pytest.raises(SystemExit, match=rf"error: lm_eval 0\.4\.13 cannot be imported \(import of .*\); {REMEDY}"):
            load_stock_evaluation()
        assert MODULE not in sys.modules
