"""`headlong check`."""

import json
import re

from headlong.backends.torch.native.library import library


def test_it_says_what_the_machine_has(command):
    ran = command("check", "--threads", "1")
    assert ran.code == 0
    path = "compiled C" if library() else "plain PyTorch"
    assert re.search(r"^device +CPU, 1 threads in float32$", ran.out, re.MULTILINE)
    assert re.search(rf"^linear layers +{path}", ran.out, re.MULTILINE)
    assert re.search(r"^copies +\d+ GB/s read and written$", ran.out, re.MULTILINE)


def test_as_json(command):
    found = json.loads(command("check", "--json").out)
    assert found["copy_bytes_per_s"] > 1e8
    assert {"linear layers", "attention", "Gated DeltaNet", "sampling", "prompts"} <= set(found["paths"])


def test_a_device_that_is_not_there(command):
    ran = command("check", "--device", "cuda:9")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
