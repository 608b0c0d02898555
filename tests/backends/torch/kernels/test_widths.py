"""The kernels as machines with other vectors build them."""

import platform
import subprocess
import sys

import pytest

from headlong.backends.torch.native.library import library

CHECKED = """
import sys, torch
from headlong.backends.torch.native import library
library.FLAGS = tuple(sys.argv[1] if flag == "-march=native" else flag for flag in library.FLAGS)
from headlong.backends.torch.kernels.linear import Int8Weight, Weight
from headlong.backends.torch.kernels.pick import embed

generator = torch.Generator().manual_seed(0)
lib = library.library()
for rows, size in ((7, 33), (50, 64), (130, 257)):
    for dtype in (torch.float32, torch.bfloat16):
        matrix, x = (torch.randn(count, size, generator=generator) for count in (rows, 131))
        matrix = matrix.to(dtype)
        weight, exact = Weight(matrix), x.double() @ matrix.double().T
        many = weight.multiply(x)
        bound = 1e-6 * (x.abs().double() @ matrix.abs().double().T)
        assert ((many - exact).abs() <= bound).all()
        for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33):
            assert torch.equal(torch.cat([weight.multiply(part) for part in x.split(count)]), many), count
        assert torch.equal(embed(weight, torch.arange(rows), torch.float32), matrix.float())
        rough = Int8Weight(lib, rows, [matrix]).multiply(x)
        assert (rough - exact).norm() < 0.02 * exact.norm()
        assert torch.equal(Int8Weight(lib, rows, [matrix]).multiply(x[:5]), rough[:5])
print(lib.strip_rows)
"""


@pytest.mark.skipif(library() is None or platform.machine() != "x86_64", reason="no C compiler for these machines")
@pytest.mark.parametrize(("machine", "rows"), [("x86-64", 12), ("x86-64-v3", 24)])
def test_vectors_of_other_widths(machine, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", CHECKED, f"-march={machine}"], capture_output=True, text=True, check=False
    )
    if done.returncode == -4:
        pytest.skip("this machine lacks such vectors")
    assert done.stdout == f"{rows}\n", done.stderr
