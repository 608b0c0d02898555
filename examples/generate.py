"""Answer a few prompts together: python examples/generate.py MODEL"""

import sys

import headlong

PROMPTS = ["The capital of France is", "Ten prime numbers: 2, 3, 5,", "def fibonacci(n):"]

engine = headlong.load(sys.argv[1])
for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, max_tokens=64), strict=True):
    drafting = output.speculative
    print(f"{prompt}{output.text}")
    if drafting.used == "none":
        print(f"[{len(output.tokens)} tokens, no drafts: {drafting.reason}]\n")
    else:
        print(f"[{len(output.tokens)} tokens, {drafting.mean_length:.2f} a round with {drafting.used}]\n")
engine.close()
