"""Every option of an engine, its default and its check, in one frozen dataclass."""

import re
from dataclasses import dataclass

from headlong.errors import UserError

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFT_KINDS = ("auto", "mtp", "ngram", "none")
REQUEST_DRAFT_KINDS = ("auto", "mtp", "ngram", "prediction", "none")
MAX_DEPTH = 8
LEAST = {
    "rows": 1,
    "context": 0,
    "page": 1,
    "chunk": 0,
    "budget": 0,
    "cache_tokens": 0,
    "prefix_bytes": 0,
    "queue": 1,
    "threads": 0,
}
MEANS_AUTO = dict.fromkeys(("context", "chunk", "budget", "cache_tokens", "threads"), " (0: chosen for you)")


@dataclass(frozen=True)
class Settings:
    """How a model is run. What a request asks for is in `Request`."""

    device: str = "auto"  # auto: cuda if there is one, else cpu; "cuda:1" is allowed
    dtype: str = "auto"  # auto: float32 on cpu, bfloat16 on cuda
    rows: int = 8  # sequences that run at once
    context: int = 0  # longest sequence in tokens; 0: the model's own limit, at most 16384
    page: int = 128  # tokens in one K/V page
    chunk: int = 0  # tokens in one prefill chunk, a multiple of the page; 0: one page on a CPU, eight on a GPU
    budget: int = 0  # prompt tokens between two rounds while rows decode; 0: a third of a chunk on a CPU, one on a GPU
    cache_tokens: int = 0  # positions that all rows together may hold; 0: every row's whole context
    memory_fraction: float = 0.9  # of a GPU's memory that weights, pages and rounds may take
    prefix_bytes: int = 1 << 30  # for prompts' beginnings kept for later requests; 0: none are kept
    queue: int = 1024  # requests that may wait; one more is refused, but a list is taken whole
    draft_kind: str = "auto"  # auto: the model's head if it has one, n-grams, and a request's prediction
    threads: int = 0  # of the CPU; 0: as many as torch takes. Without compiled kernels prompts' last bits depend on it

    def __post_init__(self) -> None:
        if not DEVICE.fullmatch(self.device):
            raise UserError(f"device is {self.device!r}; it must be auto, cpu, cuda or cuda:N.")
        if self.dtype not in DTYPES:
            raise UserError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")
        if self.draft_kind not in DRAFT_KINDS:
            raise UserError(f"draft kind is {self.draft_kind!r}; it must be one of {', '.join(DRAFT_KINDS)}.")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int):
                raise UserError(f"{name} is {value!r}; it must be a whole number.")
            if value < least:
                raise UserError(f"{name} is {value}; it must be at least {least}{MEANS_AUTO.get(name, '')}.")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise UserError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1.")
        if self.chunk % self.page:
            raise UserError(f"chunk is {self.chunk} and page is {self.page}; chunk must be a multiple of page.")
