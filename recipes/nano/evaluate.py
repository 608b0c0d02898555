"""What the exported model can do, measured through headlong on packages that training never saw.

    python evaluate.py --model work/nano --text work/text --humaneval HumanEval.jsonl.gz --out work/evaluation

Bits per byte of code and documentation; acceptance and tokens a round; how many of 200 function stubs are completed
to something that parses; HumanEval. Writes results.json, and prompts.jsonl for `headlong bench --prompts`.
HumanEval runs what the model wrote, in a process of its own with limits: do that on a machine you can spare.
"""

import argparse
import ast
import gzip
import json
import math
import random
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import headlong
from headlong.checkpoint.packed import pair
from headlong.checkpoint.shards import gather
from headlong.checkpoint.tensor import as_float32, whole
from model import Nano, Shape
from tokenizer import END, documents

CONTEXT = 2048
STOPS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n@", "\nimport ", "\nfrom ", "\n#")


# --- bits per byte -----------------------------------------------------------------------------------------------


def trained(folder: Path) -> Nano:
    """The exported weights back in the training model."""
    config = json.loads((folder / "config.json").read_text())
    tensors, _ = gather(folder, config)
    arrays = {name: as_float32(whole(item).read()) for name, item in pair(tensors, config).items()}
    model = Nano(Shape())
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return model.eval()


@torch.no_grad()
def bits_per_byte(model: Nano, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Each text alone, in blocks of the context's length."""
    nats = 0.0
    for text in texts:
        ids = [tokenizer.token_to_id(END), *tokenizer.encode(text).ids]
        for start in range(0, len(ids) - 1, CONTEXT):
            block = torch.tensor(ids[start : start + CONTEXT + 1])
            padded = F.pad(block[:-1], (0, -(len(block) - 1) % 64))
            hidden = model.model(padded[None])[0, : len(block) - 1]
            nats += float(F.cross_entropy(F.linear(hidden, model.vocabulary), block[1:], reduction="sum"))
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


# --- prompts from held-out code ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stub:
    """A function up to the end of its docstring, and what stands before it in its file."""

    before: str
    head: str
    indent: int


def stubs(sources: list[str], count: int) -> list[Stub]:
    dice = random.Random(0)
    found = []
    for source in sources:
        inside = list(_stubs_of(source))
        found += dice.sample(inside, min(3, len(inside)))
    dice.shuffle(found)
    return found[:count]


def _stubs_of(source: str) -> Iterator[Stub]:
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 2:
            continue
        first, last = node.lineno - 1, node.body[0].end_lineno
        before = "\n".join(lines[:first])[-1500:]
        before = before[before.find("\n") + 1 :] if first and len(before) == 1500 else before
        if len(head := "\n".join(lines[first:last])) < 1500:
            yield Stub(before, head, node.col_offset)


def body_of(text: str, indent: int) -> tuple[str, bool]:
    """The lines that belong to the function, and whether it ended by itself."""
    kept = []
    for line in text.split("\n"):
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            return "\n".join(kept), True
        kept.append(line)
    return "\n".join(kept[:-1]), False


def parses(stub: Stub, body: str) -> bool:
    if not body.strip():
        return False
    try:
        ast.parse(textwrap.dedent(" " * stub.indent + stub.head.lstrip() + "\n" + body))
    except (SyntaxError, ValueError):
        return False
    return True


def stub_results(engine: headlong.Engine, found: list[Stub]) -> dict[str, Any]:
    whole = cut = 0
    for stub in found:
        prompt = f"{stub.before}\n{stub.head}\n" if stub.before else f"{stub.head}\n"
        output = engine.generate(prompt, max_tokens=200, depth=3)
        body, ended = body_of(output.text, stub.indent)
        good = parses(stub, body)
        whole += good and (ended or output.finish_reason == "stop")
        cut += good and not (ended or output.finish_reason == "stop")
    return {
        "stubs": len(found),
        "parse": (whole + cut) / len(found),
        "parse_and_end_within_200_tokens": whole / len(found),
    }


def continuations(sources: list[str], count: int) -> list[str]:
    """Files cut at a line somewhere in their middle, with up to 1,500 characters before the cut."""
    dice = random.Random(1)
    chosen = [source for source in sources if len(source) > 4000]
    prompts = []
    for source in dice.sample(chosen, min(count, len(chosen))):
        end = source.find("\n", dice.randrange(1500, len(source) - 1500)) + 1
        start = source.find("\n", max(0, end - 1500)) + 1
        prompts.append(source[start:end])
    return prompts


def acceptance(engine: headlong.Engine, prompts: list[str], depth: int, **sampling: Any) -> dict[str, Any]:
    drafted, accepted, rounds = [0] * depth, [0] * depth, 0
    for prompt in prompts:
        spent = engine.generate(prompt, max_tokens=128, depth=depth, **sampling).speculative
        rounds += spent.rounds
        for i in range(depth):
            drafted[i] += spent.drafted_by_position[i]
            accepted[i] += spent.accepted_by_position[i]
    shares = [round(a / d, 4) for a, d in zip(accepted, drafted, strict=True)]
    return {"depth": depth, "by_position": shares, "mean_length": round(1 + sum(accepted) / rounds, 3)}


# --- HumanEval ---------------------------------------------------------------------------------------------------


def passes(problem: dict[str, str], text: str) -> bool:
    program = f"{problem['prompt']}{text}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    try:
        run = subprocess.run(
            [sys.executable, "-I", "-c", program], capture_output=True, timeout=10, preexec_fn=_limited, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def humaneval(engine: headlong.Engine, file: Path) -> dict[str, Any]:
    with gzip.open(file, "rt") as lines:
        problems = [json.loads(line) for line in lines]
    passed, length, drafting = [], 0, 0
    for problem in problems:
        output = engine.generate(problem["prompt"], max_tokens=200, depth=3, stop=STOPS)
        length += len(output.tokens)
        drafting += output.speculative.rounds
        if passes(problem, output.text):
            passed.append(problem["task_id"])
    return {
        "problems": len(problems),
        "passed": len(passed),
        "which": passed,
        "tokens_a_round": round(length / drafting, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    code, docs = (list(documents(args.text / f"heldout-{kind}.jsonl")) for kind in ("code", "docs"))
    prompts = continuations(code, 40)
    with (args.out / "prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    engine = headlong.load(args.model)
    results: dict[str, Any] = {"greedy": [acceptance(engine, prompts, depth) for depth in (1, 2, 3, 4)]}
    results["temperature 0.8"] = acceptance(engine, prompts, 3, temperature=0.8, seed=1)
    print(json.dumps(results), flush=True)
    results |= stub_results(engine, stubs(code, 200))
    print(json.dumps(results), flush=True)
    model, tokenizer = trained(args.model), Tokenizer.from_file(str(args.model / "tokenizer.json"))
    dice = random.Random(2)
    for kind, texts in (("code", code), ("docs", docs)):
        results[f"bits_per_byte_{kind}"] = round(
            bits_per_byte(model, tokenizer, dice.sample(texts, min(80, len(texts)))), 4
        )
    if args.humaneval:
        results["humaneval"] = humaneval(engine, args.humaneval)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
