"""The place of the largest number of every row."""

from __future__ import annotations

import torch
from torch import Tensor

_RUN = 64  # columns


def argmax_rows(values_NV: Tensor) -> Tensor:
    """torch.argmax over the last dimension, [N]; of equal ones the first.

    On a CPU torch's own is not vectorised, amax is: taking the best run of columns first and then the best of that run
    is four times as fast for a row of 32,768.
    """
    rows, columns = values_NV.shape
    if values_NV.is_cuda or columns % _RUN or not rows:
        return values_NV.argmax(1)
    runs_NRC = values_NV.view(rows, -1, _RUN)
    run_N1 = runs_NRC.amax(2).argmax(1, keepdim=True)
    best_NC = runs_NRC.gather(1, run_N1[..., None].expand(-1, 1, _RUN))[:, 0]
    return torch.add(best_NC.argmax(1), run_N1[:, 0], alpha=_RUN)
