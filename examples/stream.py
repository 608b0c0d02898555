"""Show a chat answer as it comes, accepted drafts in capitals: python examples/stream.py "a question" [MODEL]"""

import sys

import headlong

engine = headlong.load(*sys.argv[2:3])
prompt = engine.text.encode_chat([{"role": "user", "content": sys.argv[1]}])
for piece in engine.stream(prompt, max_tokens=200, temperature=0.7, seed=1):
    print(piece.text.upper() if piece.drafted else piece.text, end="", flush=True)
print()
engine.close()
