"""Answer a few prompts together: python examples/generate.py [MODEL]"""

import sys

import headlong

PROMPTS = ["import json\n\n\ndef read_json(path):\n", "The file is opened when", "class Stack:\n"]

engine = headlong.load(*sys.argv[1:2])
for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, max_tokens=64), strict=True):
    drafting = output.speculative
    print(f"{prompt}{output.text}")
    if drafting.used == "none":
        print(f"[{len(output.tokens)} tokens, no drafts: {drafting.reason}]\n")
    else:
        print(f"[{len(output.tokens)} tokens, {drafting.mean_length:.2f} a round with {drafting.used}]\n")
engine.close()
