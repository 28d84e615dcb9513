"""Private names of other packages: all are listed, all are there, and a missing one leaves the rest alone."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys

import pytest

from adaptive_batching._patches import PRIVATE
from tests.conftest import ROOT
from tests.support import house


def test_every_private_name_in_use_is_listed_and_no_other() -> None:
    paths = house.files_of(house.PACKAGE)
    used = {name for path in paths for name in house.private_names(ast.parse((ROOT / path).read_text()))}
    assert used - {"torch.nn.modules.batchnorm._BatchNorm"} <= {*PRIVATE}
    assert {*PRIVATE} - used <= {"torch.nn.modules.batchnorm._BatchNorm"}, "reached by torch.nn"


@pytest.mark.parametrize("name", PRIVATE)
def test_every_listed_name_is_there(name: str) -> None:
    try:
        pkgutil.resolve_name(name)
    except AttributeError:  # a module that its package does not import
        importlib.import_module(name)


IMPORT_WITHOUT = """
import importlib, os, sys
import torch, torch.distributed.fsdp, torch.nn.utils.stateless
for name in sys.argv[1:]:
    owner, _, last = name.rpartition(".")
    if os.fork() == 0:
        try:
            where = importlib.import_module(owner)
            getattr(where, last, None)
            vars(where).pop(last, None)
            import adaptive_batching
            step = adaptive_batching.growth.step()
            assert adaptive_batching.plan_batch_sizes(4, step, epochs=2, samples=64, maximum=8) == [4, 8]
            os._exit(0)
        except BaseException as error:
            print(name, type(error).__name__, error, flush=True)
            os._exit(1)
    os.wait()
"""


def test_the_package_is_imported_without_any_of_torch_s_private_names() -> None:
    names = [name for name in PRIVATE if name.startswith("torch.") and "._C." not in name and "Variable" not in name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IMPORT_WITHOUT, *names]
    assert subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, check=True).stdout == ""
