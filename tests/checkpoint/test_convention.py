"""Which signs tell how norms are stored, and which of two that disagree is believed."""

import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.convention import head_norms, trunk_norms
from headlong.checkpoint.safetensors import read_header


def stored(path, form="", **tensors):
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(named, path / "x.safetensors", {"format": form} if form else None)
    return {item.name.removeprefix("language_model.model."): item for item in read_header(path / "x.safetensors")}


def norms(low, qk):
    tensors = {"mtp.layers.0.input_layernorm.weight": torch.full((4,), low)}
    return {**tensors, "mtp.layers.0.self_attn.q_norm.weight": torch.full((4,), qk)}


@pytest.mark.parametrize(("shape", "kind"), [((8, 1, 4), "delta"), ((8, 4, 1), "absolute")])
@pytest.mark.parametrize("form", ["", "pt", "mlx"])
def test_trunk_by_convolution_whatever_the_label(tmp_path, shape, kind, form):
    found = stored(tmp_path, form, **{"layers.0.linear_attn.conv1d.weight": torch.zeros(shape)})
    assert trunk_norms(found).kind == kind


@pytest.mark.parametrize(("form", "kind"), [("pt", "delta"), ("mlx", "absolute")])
@pytest.mark.parametrize("shape", [(8, 1, 1), (8, 4)])
def test_trunk_by_label_when_the_convolution_does_not_tell(tmp_path, form, kind, shape):
    assert (
        trunk_norms(stored(tmp_path, form, **{"layers.0.linear_attn.conv1d.weight": torch.zeros(shape)})).kind == kind
    )


def test_trunk_by_key_names(tmp_path):
    found = stored(tmp_path, **{"language_model.model.norm.weight": torch.zeros(2)})
    assert trunk_norms(found).kind == "absolute"
    assert trunk_norms(stored(tmp_path, **{"model.language_model.norm.weight": torch.zeros(2)})).kind == "delta"


@pytest.mark.parametrize(("low", "kind"), [(0.3, "delta"), (0.9, "absolute")])
def test_trunk_by_size(tmp_path, low, kind):
    assert trunk_norms(stored(tmp_path, **{"layers.0.input_layernorm.weight": torch.full((4,), low)})).kind == kind


@pytest.mark.parametrize(("low", "qk", "kind"), [(0.35, 0.74, "delta"), (0.0, 0.0, "delta"), (0.88, 1.74, "absolute")])
@pytest.mark.parametrize("form", ["", "pt", "mlx"])
def test_head_by_size_whatever_the_label(tmp_path, low, qk, kind, form):
    assert head_norms(stored(tmp_path, form, **norms(low, qk))).kind == kind


@pytest.mark.parametrize(("form", "kind"), [("pt", "delta"), ("mlx", "absolute"), ("", "absolute")])
@pytest.mark.parametrize(("low", "qk"), [(0.6, 0.7), (0.4, 1.5)])
def test_head_by_label_when_sizes_do_not_tell(tmp_path, form, kind, low, qk):
    assert head_norms(stored(tmp_path, form, **norms(low, qk))).kind == kind


def test_no_norms_no_verdict():
    assert head_norms({}).kind == ""
    assert str(trunk_norms({})) == ""
