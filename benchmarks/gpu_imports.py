"""Import torchtune and torchao, which ask for the device's capability, in a process whose children can use the device.

CUDA does not survive a fork, so that a child asks for it.
"""

import multiprocessing
import os
import time
from unittest import mock

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask whether there is a device touches none

import torch
from torch._inductor import config as of_inductor
from torch.utils._triton import has_triton

STARTED = time.monotonic()
capability = (0, 0)
if torch.cuda.is_available():
    forks = multiprocessing.get_context("fork")
    answers = forks.SimpleQueue()
    child = forks.Process(target=lambda: answers.put(torch.cuda.get_device_capability()))
    child.start()
    child.join()
    capability = (9, 0) if answers.empty() else answers.get()

with (
    mock.patch("torch.cuda.get_device_capability", return_value=capability),
    of_inductor.patch(triton_disable_device_detection=True),
):
    import torchao  # noqa: F401
    import torchtune.utils  # noqa: F401
    from torchtune.modules import attention_utils  # noqa: F401
has_triton.cache_clear()  # it has taken that for an answer
