"""Every option of an engine, its default and its check, in one frozen dataclass."""

import re
from dataclasses import dataclass

from headlong.errors import UserError

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFT_KINDS = ("auto", "mtp", "none")
MAX_DEPTH = 8
AUTO_DEPTH = 2


@dataclass(frozen=True)
class Settings:
    """How a model is run. What a request asks for is in `Request`."""

    device: str = "auto"  # auto: cuda if there is one, else cpu; "cuda:1" is allowed
    dtype: str = "auto"  # auto: float32 on cpu, bfloat16 on cuda
    rows: int = 8  # sequences that run at once
    context: int = 0  # longest sequence in tokens; 0: the model's own limit, at most 16384
    page: int = 128  # tokens in one K/V page
    chunk: int = 512  # tokens in one prefill chunk, a multiple of the page
    draft_kind: str = "auto"  # auto: the model's head if it has one
    threads: int = 0  # of the CPU; 0: as many as torch takes. Prompts' last bits depend on it

    def __post_init__(self) -> None:
        if not DEVICE.fullmatch(self.device):
            raise UserError(f"device is {self.device!r}; it must be auto, cpu, cuda or cuda:N.")
        if self.dtype not in DTYPES:
            raise UserError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")
        if self.draft_kind not in DRAFT_KINDS:
            raise UserError(f"draft kind is {self.draft_kind!r}; it must be one of {', '.join(DRAFT_KINDS)}.")
        for name in ("rows", "context", "page", "chunk", "threads"):
            if not isinstance(getattr(self, name), int):
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be a whole number.")
        if self.rows < 1:
            raise UserError(f"rows is {self.rows}; it must be at least 1.")
        if self.context < 0:
            raise UserError(f"context is {self.context}; it must be 0 (chosen for you) or a number of tokens.")
        if self.threads < 0:
            raise UserError(f"threads is {self.threads}; it must be 0 (chosen for you) or a number of threads.")
        if self.page < 1 or self.chunk < 1 or self.chunk % self.page:
            raise UserError(f"chunk is {self.chunk} and page is {self.page}; chunk must be a multiple of page.")
