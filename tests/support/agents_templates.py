"""Chat templates in the manner of common models, on a byte tokenizer."""

import json
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from openrlhf.agents.testing import ByteTokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}{{ '<s>' }}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}"
    "{% endfor %}"
)
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set text = m.content or '' %}"
    "{% if '</think>' in text and loop.index0 < ns.last %}{% set text = text.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}{{ '<|im_start|>assistant\n' + text }}"
    "{% for c in m.tool_calls or [] %}{% if text or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML
)
TRIMMING = CHATML.replace("m.content", "(m.content | trim)")
NO_GENERATION_PROMPT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '### Q: ' + m.content + '\n### A: ' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for p in m.content %}"
    "{% if p.type == 'image' %}{{ '<|image|>' }}{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<s>", "</s>", "[INST]", "[/INST]", "<|image|>", "<|pad|>",
)  # fmt: skip


class TemplateTokenizer(ByteTokenizer):
    """A byte tokenizer with a jinja chat template, as Hugging Face tokenizers have it."""

    def __init__(self, template: str | None = CHATML, eos_token: str = "<|im_end|>") -> None:
        super().__init__(SPECIAL, eos_token)
        self.chat_template: Any = template
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = self._refuse
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(template or "")
        self.encoded = 0

    @staticmethod
    def _refuse(message: str) -> None:
        raise ValueError(message)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = super().encode(text, add_special_tokens)
        self.encoded += len(ids)
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return super().decode(token_ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Any,
        tools: Any = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        text = self._template.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self.encode(text) if tokenize else text
