"""Several answers at once in one event loop, with JSON among them: python examples/chat_async.py [MODEL]"""

import asyncio
import sys

import headlong

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}


async def show(engine: headlong.Engine, prompt: str, **options: object) -> None:
    text = ""
    async for piece in engine.stream_async(prompt, max_tokens=48, **options):
        text += piece.text
    print(f"--- {prompt!r}\n{text}\n")


async def main() -> None:
    with headlong.load(*sys.argv[1:2]) as engine:
        await asyncio.gather(
            show(engine, "def read_lines(path):\n"),
            show(engine, "class Stack:\n", temperature=0.8, seed=1),
            show(engine, "A person: ", json_schema=SCHEMA),
        )


asyncio.run(main())
