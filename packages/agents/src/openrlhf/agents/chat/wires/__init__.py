"""The wire formats in which clients speak to the policy: each reads requests into a `Call` and writes an `Answer`.

What is recorded knows nothing of them (`session`, `history`).
"""

from openrlhf.agents.chat.wires import anthropic, completions, responses
from openrlhf.agents.chat.wires.wire import Wire

COMPLETIONS = Wire(
    read=completions.read_chat_request,
    body=completions.body,
    chunks=completions.chunks,
    last_chunks=completions.last_chunks,
    error=completions.error,
    end="data: [DONE]\n\n",
)
MESSAGES = Wire(
    read=anthropic.read_request,
    body=anthropic.body,
    chunks=anthropic.chunks,
    last_chunks=anthropic.last_chunks,
    error=anthropic.error,
    named=True,
)
RESPONSES = Wire(
    read=responses.read_request,
    body=responses.body,
    chunks=responses.chunks,
    last_chunks=responses.last_chunks,
    error=completions.error,
    error_event=responses.error_event,
    keep=responses.keep,
    named=True,
    numbered=True,
)
