"""Trains trunk and head together on one GPU, for a given number of minutes.

    python train.py --tokens work/tokens --out work/run --minutes 18.6

The learning rate follows the clock, not the steps, so the run ends on time on any GPU. The head is trained on its
own chain: each step reads the hidden state the step before made, to depth 4, and most of its loss is taken where the
drafts so far were right, since a chain is never used past a wrong draft. Its targets are the trunk's own
distributions: what it must guess is what the trunk will say.

Writes log.jsonl while it runs and model.pt (float32) at the end. `--tiny --device cpu --steps 3` tries it anywhere.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Chain, Nano, Shape

DEPTH = 4
MIX = {"code": 0.68, "docs": 0.20, "prose": 0.03, "chat": 0.09}
HELDOUT = ("heldout-code", "heldout-docs")
TINY = Shape(vocab=512, hidden=64, layers=4, inner=128, heads=2, kv_heads=1, head_dim=32, linear_heads=2, linear_dim=32)
HEAD_SHARE = 0.3  # of the loss
UNREACHED = 0.25  # weight of chain positions whose drafts so far were not all right
WARM_UP, DECAY = 0.01, 0.45  # shares of the run
LOG_EVERY, CHECK_EVERY = 20, 400  # steps
COMPILING = 3  # steps that do not count as training


@dataclass(frozen=True)
class Options:
    minutes: float
    steps: int
    batch: int
    chained: int  # sequences of a batch that train the head
    length: int
    device: str
    muon_rate: float = 0.02
    adam_rate: float = 3e-3


class Stream:
    """One kind's tokens in blocks of a fixed length, in a new order and at a new offset each epoch."""

    def __init__(self, path: Path, length: int, device: str, seed: int) -> None:
        self.tokens = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int32)).to(device)
        self.length, self.dice = length, torch.Generator().manual_seed(seed)
        self.starts: Iterator[int] = iter(())

    def take(self, count: int) -> Tensor:
        """[count, length + 1]: the last token is a target only."""
        rows = [self._next() for _ in range(count)]
        index = torch.tensor(rows)[:, None] + torch.arange(self.length + 1)
        return self.tokens[index.to(self.tokens.device)].long()

    def _next(self) -> int:
        start = next(self.starts, None)
        if start is None:
            offset = int(torch.randint(self.length, (1,), generator=self.dice))
            last = len(self.tokens) - self.length - 1
            order = torch.randperm(max(1, (last - offset) // self.length), generator=self.dice)
            self.starts = iter((order * self.length + min(offset, last)).tolist())
            start = next(self.starts)
        return start


class Mixture:
    """Batches whose sequences come from the kinds by their shares."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.streams = [Stream(folder / f"{kind}.u16", options.length, options.device, i) for i, kind in enumerate(MIX)]
        self.owed = np.zeros(len(MIX))

    def take(self, count: int) -> Tensor:
        self.owed += np.array(list(MIX.values())) * count
        whole = np.floor(self.owed).astype(int)
        whole[0] += count - whole.sum()
        self.owed -= whole
        rows = torch.cat([stream.take(int(n)) for stream, n in zip(self.streams, whole, strict=True) if n > 0])
        return rows[torch.randperm(count)]


# --- losses ------------------------------------------------------------------------------------------------------


def text_loss(hidden: Tensor, vocabulary: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, vocabulary)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def guess_loss(hidden: Tensor, vocabulary: Tensor, wanted: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy to the trunk's distribution at the same place, and the tokens guessed.

    hidden [B, S, D] of the head, wanted [B, S, V] logits of the trunk, weight [B, S].
    """
    logits = F.linear(hidden, vocabulary).float()
    losses = -(wanted.float().softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return (losses * weight).sum() / weight.sum(), logits.argmax(-1)


class Losses:
    """Compiled once, used for training and for checks."""

    def __init__(self, model: Nano, compiled: bool) -> None:
        self.model = model
        self.text_loss = torch.compile(text_loss) if compiled else text_loss
        self.guess_loss = torch.compile(guess_loss) if compiled else guess_loss

    def text(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.text_loss(hidden, self.model.vocabulary, tokens[:, 1:])

    def chain(self, hidden: Tensor, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """By depth: the loss, and the share of right drafts where all before were right.

        hidden [B, S, D] of the trunk for tokens [B, S + 1]. Chains start where the whole depth has targets.
        """
        size = hidden.shape[1] - DEPTH
        with torch.no_grad():
            said = F.linear(hidden, self.model.vocabulary)
            choice = said.argmax(-1)
        embedded = self.model.model.embed_tokens(tokens[:, : hidden.shape[1]])
        state, memory = hidden[:, :size], Chain()
        reached = torch.ones_like(tokens[:, :size], dtype=torch.bool)
        losses, agreed = [], []
        for depth in range(1, DEPTH + 1):
            ahead = slice(depth, depth + size)
            state = self.model.mtp(state, embedded[:, ahead], memory)
            weight = torch.where(reached, 1.0, UNREACHED)
            loss, guess = self.guess_loss(state, self.model.vocabulary, said[:, ahead], weight)
            right = guess == choice[:, ahead]
            losses.append(loss)
            agreed.append((right & reached).sum() / reached.sum())
            # The text's next token is what the next step reads: a draft only where the draft was that token.
            reached = reached & right & (guess == tokens[:, depth + 1 : depth + 1 + size])
        return losses, agreed


@torch.no_grad()
def check(losses: Losses, folder: Path, options: Options) -> dict[str, float]:
    """Held-out loss, and how often the head agrees with the trunk by depth, on fixed blocks."""
    found: dict[str, float] = {}
    for kind in HELDOUT:
        rows = Stream(folder / f"{kind}.u16", options.length, options.device, 0).take(4 * options.chained)
        totals = np.zeros(1 + DEPTH)
        for part in rows.split(options.chained):
            with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
                hidden = losses.model.model(part[:, :-1])
                _, agreed = losses.chain(hidden, part)
                totals += [float(losses.text(hidden, part)), *map(float, agreed)]
        totals /= 4
        found |= {f"{kind}-loss": totals[0], **{f"{kind}-agree-{i}": totals[i] for i in range(1, DEPTH + 1)}}
    return {name: round(value, 4) for name, value in found.items()}


# --- the run -----------------------------------------------------------------------------------------------------


def optimisers(model: Nano, options: Options) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside layers, AdamW for the embedding, norms and everything small.

    Muon multiplies in bfloat16, which some CPUs claim and do not have: there AdamW takes everything.
    """
    cuda = options.device == "cuda"
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        inside = parameter.dim() == 2 and "embed" not in name and min(parameter.shape) >= 32
        (matrices if cuda and inside else rest).append(parameter)
    adam = torch.optim.AdamW(rest, lr=options.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
    muon = [torch.optim.Muon(matrices, lr=options.muon_rate, weight_decay=0.02, momentum=0.95)] if cuda else []
    return [*muon, adam]


def rate(progress: float) -> float:
    """Share of the full learning rate: up, flat, down to nothing."""
    return round(max(0.0, min(1.0, progress / WARM_UP, (1 - progress) / DECAY)), 4)


class Run:
    """Steps until the time is up, and what is said of them."""

    def __init__(self, model: Nano, folder: Path, out: Path, options: Options) -> None:
        self.model, self.folder, self.out, self.options = model, folder, out, options
        self.cuda = options.device == "cuda"
        self.losses, self.mixture = Losses(model, compiled=self.cuda), Mixture(folder, options)
        self.steppers = optimisers(model, options)
        self.groups = [group for stepper in self.steppers for group in stepper.param_groups]
        self.full = [group["lr"] for group in self.groups]
        if self.cuda:
            torch.backends.cuda.matmul.allow_tf32 = True
            torch._dynamo.config.recompile_limit = 64
            for part in (*model.model.layers, model.mtp):
                part.compile()

    def go(self) -> None:
        began, steps, progress = time.monotonic(), 0, 0.0
        with (self.out / "log.jsonl").open("w") as log:
            while progress < 1:
                found = self.step(progress)
                steps += 1
                if steps == COMPILING:
                    began = time.monotonic()
                seconds = time.monotonic() - began
                progress = steps / self.options.steps if self.options.steps else seconds / 60 / self.options.minutes
                if steps % LOG_EVERY == 0 or progress >= 1:
                    tokens = steps * self.options.batch * self.options.length
                    entry = {"step": steps, "seconds": round(seconds, 1), "tokens": tokens, "rate": rate(progress)}
                    entry |= {name: np.round(value.tolist(), 4).tolist() for name, value in found.items()}
                    if not math.isfinite(entry["loss"]):
                        raise SystemExit(f"the loss is {entry['loss']} at step {steps}")
                    if steps % CHECK_EVERY == 0 or progress >= 1:
                        entry |= check(self.losses, self.folder, self.options)
                    for place in (log, sys.stdout):
                        print(json.dumps(entry), file=place, flush=True)

    def step(self, progress: float) -> dict[str, Tensor]:
        """One batch: losses, gradients, one step of the weights."""
        count, tokens = self.options.chained, self.mixture.take(self.options.batch)
        with torch.autocast(self.options.device, torch.bfloat16, enabled=self.cuda):
            hidden = self.model.model(tokens[:, :-1])
            text = self.losses.text(hidden, tokens)
            chain, agreed = self.losses.chain(hidden[:count], tokens[:count])
            loss = text + HEAD_SHARE * torch.stack(chain).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group, top in zip(self.groups, self.full, strict=True):
            group["lr"] = top * rate(progress)
        for stepper in self.steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        found = {"loss": text, "norm": norm, "chain": torch.stack(chain), "agree": torch.stack(agreed)}
        return {name: value.detach() for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=Path, required=True, help="folder of tokenizer.py's token files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=18.6)
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps instead")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence, a multiple of 64")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights, to try the recipe")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Nano(TINY if args.tiny else Shape()).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    options = Options(args.minutes, args.steps, args.batch, max(1, args.batch // 4), args.length, args.device)
    Run(model, args.tokens, args.out, options).go()
    torch.save({"shape": model.shape.as_dict(), "weights": model.state_dict()}, args.out / "model.pt")


if __name__ == "__main__":
    main()
