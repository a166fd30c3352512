"""How a model family writes a conversation, and the Jinja source that does it."""

from __future__ import annotations

from dataclasses import dataclass, field

TEXT, TRIMMED = "m.content", "(m.content | trim)"
PARTS = "(m.content | map(attribute='text') | join(''))"
EITHER = "(m.content if m.content is string else m.content | map(attribute='text') | join(''))"

JSON_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
HERMES = f"\n<tool_call>\n{JSON_CALL}\n</tool_call>"
LLAMA_CALL = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
TEXT_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ '' + f.arguments }}\n```<｜tool▁call▁end｜>"
)
XML_CALL = (
    "\n<tool_call>\n<function={{ f.name }}>{% for k, v in f.arguments.items() %}\n<parameter={{ k }}>\n{{ v }}\n"
    "</parameter>{% endfor %}\n</function>\n</tool_call>"
)
KEYED_CALL = (
    "\n<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>{% endfor %}\n</tool_call>"
)
INVOKE_CALL = (
    '<invoke name="{{ f.name }}">{% for k, v in f.arguments.items() %}<parameter name="{{ k }}">{{ v }}</parameter>'
    "{% endfor %}</invoke>"
)
PYTHON_CALL = '{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="{{ v }}"{% endfor %})'


@dataclass(frozen=True, kw_only=True)
class Family:
    """One template. user, system, tool: a turn, its text where [] stands. head, tail: around every turn of the model;
    ask: the generation prompt (else `head`).

    system "" : refused; None: left out. call: how a tool call is written, `f` being its function; calls_in: around all
    calls of a turn. think: what happens to reasoning: "" it is not known, "field" is written from `reasoning_content`,
    "last" is written only behind the last question, "cut" is removed wherever it stands. close: behind the whole text.
    """

    user: str
    head: str
    tail: str
    eos: str
    bos: str = ""
    system: str | None = ""
    tool: str = ""
    ask: str | None = None
    call: str = ""
    calls_in: tuple[str, str] = ("", "")
    content: str = TEXT
    think: str = ""
    think_tags: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    close: str = ""
    before: str = ""
    alternate: bool = False
    special: tuple[str, ...] = field(default=())

    def template(self) -> str:
        """The Jinja source."""
        loop = (
            "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
            f"{self.bos}{self.before}{{% if tools %}}{{{{ tools | tojson }}}}\n{{% endif %}}{{% for m in messages %}}"
        )
        if self.alternate:
            loop += (
                "{% if m.role in ('user', 'assistant') and loop.index0 and messages[loop.index0 - 1].role == m.role %}"
                "{{ raise_exception('roles must alternate') }}{% endif %}"
            )
        refused = "{{ raise_exception('no system role') }}"
        system = refused if self.system == "" else self._of(self.system or "")
        user, tool = self._of(self.user), self._of(self.tool) if self.tool else "{{ raise_exception('no tool role') }}"
        ask = self.head if self.ask is None else self.ask
        text = (
            f"{loop}{{% if m.role == 'system' %}}{system}{{% elif m.role == 'user' %}}{user}"
            f"{{% elif m.role == 'tool' %}}{tool}{{% else %}}{self._answer()}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{ask}{{% else %}}{self.close}{{% endif %}}"
        )
        return text.replace("%}\n", "%}{{ '\\n' }}")  # transformers lets a block eat the line end behind it

    def _of(self, frame: str) -> str:
        return frame.replace("[]", f"{{{{ {self.content} }}}}")

    def _answer(self) -> str:
        opened, closed = (f"{{{{ {tag!r} }}}}" for tag in self.think_tags)
        reasoning = f"{opened}{{{{ m.reasoning_content }}}}{closed}"
        shown = {
            "field": f"{{% if m.reasoning_content %}}{reasoning}{{% endif %}}",
            "last": f"{{% if m.reasoning_content and loop.index0 > ns.last %}}{reasoning}{{% endif %}}",
        }.get(self.think, "")
        text = f"{{{{ {self.content} }}}}"
        if self.think == "cut":
            text = "{{ (m.content or '').split('</think>')[-1] }}"
        if not self.call:
            return f"{self.head}{shown}{text}{self.tail}"
        before, after = self.calls_in
        calls = f"{before}{{% for c in m.tool_calls %}}{{% set f = c.function %}}{self.call}{{% endfor %}}{after}"
        return (
            f"{self.head}{shown}{{% if m.content %}}{text}{{% endif %}}{{% if m.tool_calls %}}{calls}{{% endif %}}"
            f"{self.tail}"
        )


def chatml(eos: str = "<|im_end|>", **options: object) -> Family:
    """The marks that most Chinese and many open families share."""
    return Family(
        user="<|im_start|>user\n[]<|im_end|>\n",
        head="<|im_start|>assistant\n",
        tail="<|im_end|>\n",
        eos=eos,
        **{  # pyright: ignore[reportArgumentType]
            "system": "<|im_start|>system\n[]<|im_end|>\n",
            "tool": "<|im_start|>user\n<tool_response>\n[]\n</tool_response><|im_end|>\n",
            **options,
        },
    )


def headers(**options: object) -> Family:
    """Llama 3: the role between header marks."""
    mark = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return Family(
        user=mark.format("user") + "[]<|eot_id|>",
        head=mark.format("assistant"),
        tail="<|eot_id|>",
        eos="<|eot_id|>",
        **{  # pyright: ignore[reportArgumentType]
            "bos": "<|begin_of_text|>",
            "system": mark.format("system") + "[]<|eot_id|>",
            "tool": mark.format("ipython") + "[]<|eot_id|>",
            "content": TRIMMED,
            **options,
        },
    )


def inst(**options: object) -> Family:
    """Mistral and Llama 2: questions between brackets."""
    return Family(
        **{  # pyright: ignore[reportArgumentType]
            "user": "[INST] [] [/INST]",
            "head": "",
            "tail": "</s>",
            "eos": "</s>",
            "bos": "<s>",
            "alternate": True,
            **options,
        }
    )


def named(user: str, assistant: str, end: str, **options: object) -> Family:
    """A mark or a word for every role, then the text, then the end."""
    return Family(
        user=f"{user}[]{end}",
        head=assistant,
        tail=end,
        **{"eos": end.strip() or "</s>", "system": f"[]{end}", **options},  # pyright: ignore[reportArgumentType]
    )


def deepseek(**options: object) -> Family:
    """Wide bars; the end of the sentence behind an answer."""
    return Family(
        user="<｜User｜>[]",
        head="<｜Assistant｜>",
        tail="<｜end▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        system="[]",
        **options,  # pyright: ignore[reportArgumentType]
    )


def glm(**options: object) -> Family:
    """The next role's mark is the end."""
    return Family(
        user="<|user|>\n[]",
        head="<|assistant|>\n",
        tail="",
        eos="<|endoftext|>",
        bos="[gMASK]<sop>",
        system="<|system|>\n[]",
        tool="<|observation|>\n[]",
        **options,  # pyright: ignore[reportArgumentType]
    )


def cohere(**options: object) -> Family:
    """Turn and role marks in capitals."""
    mark = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
    return Family(
        user=mark.format("USER") + "[]<|END_OF_TURN_TOKEN|>",
        head=mark.format("CHATBOT"),
        tail="<|END_OF_TURN_TOKEN|>",
        eos="<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        system=mark.format("SYSTEM") + "[]<|END_OF_TURN_TOKEN|>",
        **options,  # pyright: ignore[reportArgumentType]
    )


def gemma(**options: object) -> Family:
    """Turns between start and end; the model is "model"."""
    return Family(
        user="<start_of_turn>user\n[]<end_of_turn>\n",
        head="<start_of_turn>model\n",
        tail="<end_of_turn>\n",
        eos="<eos>",
        bos="<bos>",
        **{"content": TRIMMED, "alternate": True, **options},  # pyright: ignore[reportArgumentType]
    )
