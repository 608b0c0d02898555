"""Trains the tokenizer on the corpus and turns the corpus into token files.

    python tokenizer.py --text work/text --out work/tokens --model work/model

A byte-level BPE of 16,384 ids with Qwen3.5's split pattern and the names of its special tokens, so that the files
read like a Qwen3.5 tokenizer. Token files are uint16, documents end with <|endoftext|>. Needs: tokenizers, numpy.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 16_384
END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END, START_TURN, END_TURN)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLE = {"code": 60_000_000, "docs": 25_000_000, "prose": 5_000_000, "chat": 5_000_000}  # characters to learn from
KINDS = ("heldout-code", "heldout-docs", "prose", "chat", "docs", "code")
BATCH = 2000


def documents(path: Path) -> Iterator[str]:
    """Texts as the model is to see them: conversations in turns, as the template writes them."""
    with path.open() as file:
        for line in file:
            record = json.loads(line)
            if "messages" in record:
                yield "".join(f"{START_TURN}{m['role']}\n{m['content']}{END_TURN}\n" for m in record["messages"])
            else:
                yield record["text"]


def sample(text: Path) -> Iterator[str]:
    """Every so many documents of each kind, up to its share."""
    for kind, wanted in SAMPLE.items():
        path = text / f"{kind}.jsonl"
        every = max(1, path.stat().st_size // wanted)
        yield from islice(documents(path), 0, None, every)


def train(texts: Iterator[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return tokenizer


def write_model_files(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "eos_token": END_TURN,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: Tokenizer, source: Path, target: Path) -> int:
    """Writes one kind's token file; its number of tokens."""
    end = tokenizer.token_to_id(END)
    texts, count = documents(source), 0
    with target.open("wb") as file:
        while batch := list(islice(texts, BATCH)):
            for encoding in tokenizer.encode_batch_fast(batch):
                ids = np.array([*encoding.ids, end], np.uint16)
                file.write(ids.tobytes())
                count += len(ids)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train(sample(args.text))
    assert tokenizer.get_vocab_size() == VOCABULARY
    write_model_files(tokenizer, args.model)
    counts = {kind: encode(tokenizer, args.text / f"{kind}.jsonl", args.out / f"{kind}.u16") for kind in KINDS}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
