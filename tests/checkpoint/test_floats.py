"""bfloat16 by its bits, against torch."""

import numpy as np
import pytest
import torch

from headlong.checkpoint.floats import narrow, widen

NUMBERS = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, -3.1415927, 1e-40, 3.4e38, 65504.0, 1e-8, float("inf")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_are_rounded_as_torch_rounds_them(dtype):
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    numbers = torch.cat([torch.tensor(NUMBERS), noise, noise * 1e-6])
    wanted = numbers.to(getattr(torch, dtype))
    found = narrow(numbers.numpy(), dtype)
    assert torch.equal(torch.from_numpy(found).view(getattr(torch, dtype)), wanted)
    np.testing.assert_array_equal(widen(found), wanted.float().numpy())


def test_what_is_wide_already_is_not_copied():
    numbers = np.ones(3, np.float32)
    assert widen(numbers) is numbers
