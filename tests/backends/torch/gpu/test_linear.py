"""Products on a GPU: right, and each token's the same bits whoever stands beside it."""

import pytest
import torch

pytest.importorskip("triton")

from headlong.backends.torch.gpu.linear import TOKENS, linear, linear_swiglu, tiles

SHAPES = [(64, 64), (100, 96), (33, 40), (70, 1024), (130, 1040)]  # out, in; the last two are split along k


def near(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("out", "size"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_products(device, normal, out, size, tokens):
    x, weight = normal(tokens, size).to(device), normal(out, size).to(device)
    near(linear(x, weight), x.double() @ weight.double().T)


@pytest.mark.parametrize(("out", "size"), SHAPES)
def test_a_token_is_the_same_alone(device, normal, out, size):
    x, weight = normal(33, size).to(device), normal(out, size).to(device)
    together = linear(x, weight)
    for token in (0, 15, 16, 32):
        assert torch.equal(linear(x[token : token + 1], weight)[0], together[token])


def test_matrices_of_few_rows_are_split_however_many_tokens_there_are():
    for out, size in SHAPES:
        assert len({tiles(out, size, wide).split for wide in TOKENS}) == 1
    assert tiles(70, 1024, 16).split == 2


def test_what_counts_the_parts_is_left_at_zero(device, normal):
    x, weight = normal(2, 1024).to(device), normal(70, 1024).to(device)
    assert torch.equal(linear(x, weight), linear(x, weight))


def test_rows_may_stand_apart(device, normal):
    wide, weight = normal(5, 200).to(device), normal(64, 96).to(device)
    assert torch.equal(linear(wide[:, 40:136], weight), linear(wide[:, 40:136].contiguous(), weight))


def test_what_stands_behind_the_tokens_does_not_matter(device, normal):
    room, weight = normal(20, 96).to(device), normal(64, 96).to(device)
    room[3:] = torch.nan
    assert linear(room[:3], weight).isfinite().all()


def test_codes_of_8_bits(device, normal):
    x, codes = normal(3, 96).to(device), (normal(70, 96) * 40).round().clamp(-127, 127).to(torch.int8).to(device)
    scales = normal(70).abs().to(device) / 40
    near(linear(x, codes, scales), x.double() @ (codes.double() * scales.double()[:, None]).T)


@pytest.mark.parametrize(("inner", "size"), [(32, 64), (50, 96), (65, 40)])
def test_gate_and_up(device, normal, inner, size):
    x, weight = normal(5, size).to(device), 0.3 * normal(2 * inner, size).to(device)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    found = linear_swiglu(x, weight)
    near(found, torch.nn.functional.silu(gate) * up)
    assert torch.equal(linear_swiglu(x[3:4], weight)[0], found[3])
