"""Quantised checkpoints in every layout come out as their plain twins; anything amiss is one sentence."""

import itertools
import json
import shutil
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import headlong
from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.checkpoint.inspect import inspect
from tests import tiny
from tests.backends.torch.driver import Driver, Job, fixed, open_tiny, prompt_of
from tests.checkpoint.test_weights import arrays, same, truth
from tests.quantised import expand_files, quantise

NAME = "layers.3.self_attn.k_proj"


@pytest.fixture
def twins(tmp_path):
    """A quantised model, and a plain one of the numbers it expands to."""

    def write(kind="dense", *, label="", settings=None, **options):
        folder = quantise(tiny.write(tmp_path / f"packed{label}", kind, **options), **(settings or {}))
        twin = shutil.copytree(folder, tmp_path / f"plain{label}")
        return folder, expand_files(twin)

    return write


@pytest.fixture
def one(tmp_path):
    """A model with a single quantised tensor."""
    return quantise(tiny.write(tmp_path / "model", storage="mlx"), group_size=32, parts=NAME)


def read_it(folder):
    return open_checkpoint(str(folder)).weights.read(f"{NAME}.weight", (32, 32))


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
@pytest.mark.parametrize("storage", ["hf", "mlx"])
@pytest.mark.parametrize("head", ["main", "sidecar", "bare"])
def test_every_storage_of_a_quantised_model(twins, kind, storage, head):
    for sharded, prefix in itertools.product((False, True), ("text", "vl")):
        options = {"storage": storage, "head": head, "sharded": sharded, "tied": sharded}
        options["prefix"] = "text" if kind == "next" else prefix
        packed, plain = twins(kind, label=f"{sharded}{prefix}", **options)
        same(arrays(packed), arrays(plain))


@pytest.mark.parametrize("experts", ["packed", "per_expert", "stacked"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_way_to_store_quantised_experts(twins, experts, bits):
    packed, plain = twins("moe", experts=experts, settings={"bits": bits})
    same(arrays(packed), arrays(plain))


@pytest.mark.parametrize(("key_heads", "value_heads"), [(4, 4), (2, 4), (1, 4), (3, 9)])
def test_fused_projections_are_cut_by_whole_rows(twins, key_heads, value_heads):
    sizes = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    packed, plain = twins("next", linear_value_head_dim=5, **sizes)
    same(arrays(packed), arrays(plain))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [8, 16, 32])
@pytest.mark.parametrize("scales", ["float32", "float16", "bfloat16"])
def test_every_width_group_and_type_of_scales(twins, bits, group_size, scales):
    packed, plain = twins(settings={"bits": bits, "group_size": group_size, "scales": scales})
    found = arrays(packed)
    same(found, arrays(plain))
    for name, array in truth(packed).items():
        step = np.ptp(array) / (2**bits - 1) * 1.02
        np.testing.assert_allclose(found[name], array, rtol=0, atol=step / 2, err_msg=name)


def test_quantised_tensors_are_float32_and_the_others_as_they_are(tmp_path):
    folder = quantise(tiny.write(tmp_path, dtype="bfloat16"), others={"lm_head": False})
    weights = open_checkpoint(str(folder)).weights
    assert weights.read("embed_tokens.weight", (128, 32)).dtype == "float32"
    assert weights.read("lm_head.weight", (128, 32)).dtype == "bfloat16"
    assert weights.read("layers.0.linear_attn.conv1d.weight", (128, 4)).dtype == "bfloat16"
    assert weights.skipped == {}


def test_some_layers_otherwise(twins):
    others = {"mlp.gate": 8, "mtp.fc": 2, "o_proj": False, "layers.1.": 8}
    packed, plain = twins("moe", storage="mlx", settings={"bits": 4, "others": others})
    settings = json.loads((packed / "config.json").read_text())["quantization"]
    assert settings["language_model.model.layers.0.mlp.gate"]["bits"] == 8
    same(arrays(packed), arrays(plain))


@pytest.mark.parametrize("old", ["language_model.model.layers.", "language_model.model."])
@pytest.mark.parametrize("new", ["model.language_model.", "model.", ""])
def test_paths_of_layers_are_known_whatever_precedes_them(twins, edit_config, old, new):
    packed, plain = twins(storage="mlx", settings={"bits": 4, "others": {"k_proj": 8}})
    settings = json.loads((packed / "config.json").read_text())["quantization"]
    new += old.removeprefix("language_model.model.")
    edit_config(packed, quantization={key.replace(old, new): value for key, value in settings.items()})
    same(arrays(packed), arrays(plain))


def test_either_field_of_the_config_will_do(twins, edit_config):
    packed, plain = twins()
    edit_config(packed, quantization=None)
    same(arrays(packed), arrays(plain))


def test_true_for_a_layer_means_as_the_others(twins, edit_config):
    packed, plain = twins()
    settings = json.loads((packed / "config.json").read_text())["quantization"]
    edit_config(packed, quantization={**settings, f"model.{NAME}": True, "mode": "affine"})
    same(arrays(packed), arrays(plain))


def test_scales_may_lie_in_another_file(twins, edit_tensors):
    packed, plain = twins()
    moved = {}

    def take(tensors):
        for name in [name for name in tensors if name.endswith((".scales", ".biases"))]:
            moved[name] = tensors.pop(name)

    edit_tensors(packed / "model.safetensors", take)
    save_file(moved, packed / "scales.safetensors")
    same(arrays(packed), arrays(plain))


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_logits_and_text_are_those_of_the_plain_twin(twins, kind):
    packed, plain = twins(kind, with_tokenizer=True, agreeable=True)
    traces = [
        Driver(open_tiny(folder)).run([Job(prompt_of(20, 384), depth=fixed(2))], 16)[0] for folder in (packed, plain)
    ]
    assert not traces[0].difference(traces[1], 16)
    answers = [headlong.load(folder, device="cpu").generate("Hello", max_tokens=16) for folder in (packed, plain)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].text == answers[1].text
    assert answers[0].speculative.accepted == answers[1].speculative.accepted > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 3}, "3 bits, and this version reads 2, 4 and 8"),
        ({"bits": 6}, "6 bits"),
        ({"mode": "mxfp4"}, "is quantised as mxfp4"),
        ({"mode": "nvfp4", "bits": 4}, "is quantised as nvfp4"),
        ({"bits": 4}, "which do not fit 4 bits in groups of 32"),
        ({"group_size": 64}, "which do not fit 8 bits in groups of 64"),
        ({f"language_model.model.{NAME}": {"bits": 4}}, "which do not fit 4 bits in groups of 32"),
        ({f"language_model.model.{NAME}": False}, "says that it is not quantised"),
        ({"group_size": None}, "gives no group size"),
        ({"group_size": 64, "bits": 4}, "asks for [32, 32]"),  # the same words could be 64 weights wide
    ],
)
def test_settings_that_are_not_those_of_the_file(one, refused, edit_config, changes, said):
    settings = {**json.loads((one / "config.json").read_text())["quantization"], **changes}
    edit_config(one, quantization=settings)
    sentence = refused(read_it, one)
    assert said in sentence
    assert f"{NAME}.weight" in sentence
    assert inspect(open_checkpoint(str(one))).faulty == (sentence,)


@pytest.mark.parametrize("field", ["bits", "group_size"])
@pytest.mark.parametrize("value", ["8", 0, True])
def test_settings_that_are_none(one, refused, edit_config, field, value):
    settings = json.loads((one / "config.json").read_text())["quantization"]
    edit_config(one, quantization={**settings, field: value})
    assert f"{field} = {value!r}" in refused(open_checkpoint, str(one))


def test_no_settings_at_all(one, refused, edit_config):
    edit_config(one, quantization=None, quantization_config=None)
    assert "gives no group size" in refused(read_it, one)


@pytest.mark.parametrize(
    ("ending", "tensor", "said"),
    [
        ("biases", None, "no biases"),
        ("scales", torch.zeros(32, 1, dtype=torch.uint8), "is stored as U8"),
        ("biases", torch.zeros(32, 1, dtype=torch.int64), "is stored as I64"),
        ("scales", torch.zeros(32, 2), "do not fit"),
        ("scales", torch.zeros(16, 1), "do not fit"),
        ("scales", torch.tensor(1.0), "do not fit"),
        ("biases", torch.zeros(32, 2), "do not fit"),
        ("weight", torch.zeros(31, 8, dtype=torch.uint32), "do not fit"),
        ("weight", torch.zeros(256, dtype=torch.uint32), "do not fit"),
        ("weight", torch.zeros(32, 32, dtype=torch.uint8), "is stored as U8"),
    ],
)
def test_files_that_do_not_fit_their_settings(one, refused, edit_tensors, ending, tensor, said):
    name = f"language_model.model.{NAME}.{ending}"

    def change(tensors):
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor

    edit_tensors(one / "model.safetensors", change, "mlx")
    assert said in refused(read_it, one)
    skipped = open_checkpoint(str(one)).weights.skipped
    assert skipped == {"quantisation scales": 1 if tensor is None else 2}


def test_words_without_scales_are_refused_as_before(one, refused, edit_tensors):
    def change(tensors):
        for ending in ("scales", "biases"):
            del tensors[f"language_model.model.{NAME}.{ending}"]

    edit_tensors(one / "model.safetensors", change, "mlx")
    assert "stored as U32 (MLX-quantised)" in refused(read_it, one)


def test_scales_beside_plain_weights_are_left_over(one, refused, edit_tensors):
    name = f"language_model.model.{NAME}.weight"
    edit_tensors(one / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(32, 32)}), "mlx")
    checkpoint = open_checkpoint(str(one))
    assert inspect(checkpoint).leftover == (f"{NAME}.biases", f"{NAME}.scales")


def test_a_head_that_cannot_be_expanded_is_no_head(tmp_path, edit_config):
    folder = quantise(tiny.write(tmp_path), parts="mtp.")
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    edit_config(folder, quantization={**settings, "bits": 5})
    checkpoint = open_checkpoint(str(folder))
    assert "5 bits" in checkpoint.head.reason
    assert inspect(checkpoint).whole


@pytest.mark.parametrize("experts", ["packed", "per_expert", "stacked"])
def test_experts_that_cannot_be_expanded(tmp_path, edit_config, refused, experts):
    folder = quantise(
        tiny.write(tmp_path, "moe", experts=experts), parts="experts" if experts != "stacked" else "switch"
    )
    edit_config(folder, quantization={"group_size": 8, "bits": 3})
    checkpoint = open_checkpoint(str(folder))
    assert "3 bits" in refused(checkpoint.weights.read, "layers.0.mlp.experts.down_proj", (6, 32, 24))
    assert inspect(checkpoint).leftover == ()


def test_experts_quantised_in_part(tmp_path, refused):
    folder = tiny.write(tmp_path, "next", dtype="bfloat16")
    quantise(folder, others={"layers.0.mlp.experts.1.up_proj": False, "layers.1.mlp.experts.1.up_proj": 4})
    weights = open_checkpoint(str(folder)).weights
    sentence = refused(weights.read, "layers.0.mlp.experts.gate_up_proj", (6, 48, 32))
    assert "is bfloat16 and" in sentence
    assert "is 8-bit affine, groups of 8, where one type is wanted" in sentence
    assert weights.read("layers.1.mlp.experts.gate_up_proj", (6, 48, 32)).dtype == "float32"


def test_file_cut_after_it_was_opened(one, refused):
    checkpoint = open_checkpoint(str(one))
    path = one / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "bytes before its tensors do" in refused(checkpoint.weights.read, f"{NAME}.weight", (32, 32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("experts", ["packed", "per_expert", "stacked"])
def test_expanding_holds_one_tensor_at_most(tmp_path, experts, bits):
    sizes = {"num_experts": 32, "moe_intermediate_size": 512, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    folder = quantise(tiny.write(tmp_path, "moe", experts=experts, hidden_size=128, **sizes), bits, 64)
    weights = open_checkpoint(str(folder)).weights
    tracemalloc.start()
    array = weights.read("layers.0.mlp.experts.gate_up_proj", (32, 1024, 128))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert array.data.nbytes <= peak < 1.2 * array.data.nbytes
