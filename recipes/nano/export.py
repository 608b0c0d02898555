"""Writes a trained run as a model folder: 8-bit affine groups in MLX's layout under Hugging Face's names.

    python export.py --run work/run --tokenizer work/model --out headlong/assets/nano

Every matrix of 64 columns or more is stored in 8 bits with a scale and a bias for each 64 weights of a row; the rest
(norms, convolutions, the recurrence's few vectors) in bfloat16 or float32. Needs: safetensors, and headlong itself.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from headlong.checkpoint.embedded import write_sums
from headlong.checkpoint.quant import quantize
from model import Nano, Shape
from tokenizer import END, END_TURN

BITS, GROUP = 8, 64


def stored(name: str, value: Tensor) -> dict[str, Tensor]:
    """A weight as it lies in the file: three tensors if it is quantised, else one."""
    if value.dim() != 2 or value.shape[1] % GROUP or min(value.shape) < GROUP:
        wide = name.endswith(("A_log", "dt_bias")) or value.dim() == 1
        return {name: value.float() if wide else value.bfloat16()}
    packed, scales, biases = quantize(value.float().numpy(), BITS, GROUP, "bfloat16")
    module = name.removesuffix(".weight")
    return {
        name: torch.from_numpy(packed),
        f"{module}.scales": torch.from_numpy(scales).view(torch.bfloat16),
        f"{module}.biases": torch.from_numpy(biases).view(torch.bfloat16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run = torch.load(args.run / "model.pt", map_location="cpu", weights_only=True)
    model = Nano(Shape(**run["shape"]))
    tensors: dict[str, Tensor] = {}
    for name, value in run["weights"].items():
        tensors |= stored(name.replace("._orig_mod", ""), value)
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    names = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    ends = [names.token_to_id(END_TURN), names.token_to_id(END)]
    form = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
    config = model.config() | {"eos_token_id": ends, "quantization": form, "quantization_config": form}
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.tokenizer / file, args.out / file)
    write_sums(args.out)
    print(f"{sum(f.stat().st_size for f in args.out.iterdir()) / 1e6:.1f} MB in {args.out}")


if __name__ == "__main__":
    main()
