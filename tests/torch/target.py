"""The device of the tests. conftest.py's --device sets it before any test module is read."""

import torch

DEVICE = "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # of x and the weights
DTYPE = torch.float32  # of a layer whose test is of something else


def run_on_cuda():
    """From here on a tensor is made on the GPU unless its test says otherwise."""
    global DEVICE, DTYPES, DTYPE
    DEVICE, DTYPES, DTYPE = "cuda", [torch.bfloat16, torch.float16], torch.bfloat16
    torch.set_default_device("cuda")
