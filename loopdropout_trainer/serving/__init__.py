"""A small server of OpenAI's protocol for looped models, at any depth and any gates. See docs/serving.md.

- `protocol.py`: the fields of requests, and the errors.
- `variants.py`: the model names, which select a depth and gates.
- `scheduler.py`: one thread that decodes all running requests together.
- `streams.py`: the text of a completion in pieces.
- `app.py`: the endpoints over HTTP.
- `address.py`: the address and the API key.
- `vllm_command.py`: whether vLLM can serve a model instead, and its command line.
"""
