"""How many K/V pages fit beside the weights of a model."""

from dataclasses import dataclass

import torch

from headlong.errors import UserError
from headlong.settings import Settings

ROUNDS = 2 << 30  # bytes that captured rounds and prompts' passes may take, kept free of pages
GIB = 1 << 30


@dataclass(frozen=True)
class Room:
    """Bytes of a GPU."""

    free: int
    total: int

    @staticmethod
    def of(device: torch.device) -> "Room":
        return Room(*torch.cuda.mem_get_info(device))

    def for_pages(self, fraction: float, states: int) -> int:
        """What is left for pages after the weights, which are there, and the rows' recurrent states, which are not."""
        return int(self.free - (1.0 - fraction) * self.total) - ROUNDS - states


def pages_that_fit(wanted: int, least: int, page_bytes: int, left: int, settings: Settings) -> int:
    """As many of the wanted pages as there is room for: at least those of one row's whole context."""
    fitting = min(wanted, max(0, left) // page_bytes)
    if fitting >= least:
        return fitting
    missing = (least * page_bytes - left) / GIB
    held = left // page_bytes * settings.page if left > 0 else 0
    less = f"--context {held}" if held >= settings.page else "fewer --rows"
    raise UserError(
        f"{missing:.1f} GiB of GPU memory are missing for one row's context beside the weights; ask for {less}, "
        f"raise memory_fraction ({settings.memory_fraction:g}) or free memory that others hold."
    )
