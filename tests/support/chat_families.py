"""Chat templates of well-known model families, written anew from the formats that the families document.

Each has the marks of its family, what it does with the system message, with reasoning, with tool calls and with their
results; long instructions for tools are left out.
"""

from __future__ import annotations

from support.chat_family import (
    EITHER,
    HERMES,
    INVOKE_CALL,
    JSON_CALL,
    KEYED_CALL,
    LLAMA_CALL,
    PARTS,
    PYTHON_CALL,
    TEXT_CALL,
    TRIMMED,
    XML_CALL,
    Family,
    chatml,
    cohere,
    deepseek,
    gemma,
    glm,
    headers,
    inst,
    named,
)

DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_RESULT = "<｜tool▁output▁begin｜>[]<｜tool▁output▁end｜>"
PHI_TOOLS = {
    "call": LLAMA_CALL,
    "calls_in": ("<|tool_call|>[", "]<|/tool_call|>"),
    "tool": "<|tool_response|>[]<|end|>",
}
MISTRAL_TOOLS = {"call": JSON_CALL, "calls_in": ("[TOOL_CALLS] [", "]"), "tool": "[TOOL_RESULTS] [] [/TOOL_RESULTS]"}

FAMILIES: dict[str, Family] = {
    "chatml": chatml(tool=""),
    "qwen1.5": chatml(tool="", before="<|im_start|>system\nYou help.<|im_end|>\n"),
    "qwen2.5": chatml(call=HERMES, before="<|im_start|>system\nYou help.<|im_end|>\n"),
    "qwen2.5-base": chatml(eos="<|endoftext|>", call=HERMES),
    "qwq": chatml(call=HERMES, think="cut", ask="<|im_start|>assistant\n<think>\n"),
    "qwen3": chatml(call=HERMES, think="last"),
    "qwen3-thinking": chatml(call=HERMES, think="last", ask="<|im_start|>assistant\n<think>\n"),
    "qwen3-coder": chatml(call=XML_CALL),
    "qwen2-vl": chatml(content=EITHER, tool=""),
    "smolvlm": Family(
        user="User: []<end_of_utterance>\n",
        head="Assistant: ",
        tail="<end_of_utterance>\n",
        eos="<end_of_utterance>",
        bos="<|im_start|>",
        system="System: []<end_of_utterance>\n",
        content=PARTS,
        ask="Assistant:",
    ),
    "smollm2": chatml(before="<|im_start|>system\nYou are small.<|im_end|>\n", tool=""),
    "smollm3": chatml(call=HERMES, think="last", content=EITHER),
    "internlm2": chatml(bos="<s>", tool=""),
    "intern-s1": chatml(call=HERMES, think="field"),
    "yi": chatml(eos="<|endoftext|>", tool=""),
    "hermes-2-pro": chatml(bos="<|begin_of_text|>", call=HERMES, tool="<|im_start|>tool\n[]<|im_end|>\n"),
    "nemotron-h": Family(
        user="<SPECIAL_11>User\n[]\n",
        head="<SPECIAL_11>Assistant\n",
        tail="\n",
        eos="</s>",
        system="<SPECIAL_10>System\n[]\n",
        think="cut",
        special=("<SPECIAL_10>", "<SPECIAL_11>"),
    ),
    "minicpm": Family(user="<用户>[]", head="<AI>", tail="", eos="</s>", system="[]", special=("<用户>", "<AI>")),
    "moonlight": Family(
        user="<|im_user|>user<|im_middle|>[]<|im_end|>",
        head="<|im_assistant|>assistant<|im_middle|>",
        tail="<|im_end|>",
        eos="[EOS]",
        system="<|im_system|>system<|im_middle|>[]<|im_end|>",
    ),
    "kimi-k2": Family(
        user="<|im_user|>user<|im_middle|>[]<|im_end|>",
        head="<|im_assistant|>assistant<|im_middle|>",
        tail="<|im_end|>",
        eos="[EOS]",
        system="<|im_system|>system<|im_middle|>[]<|im_end|>",
        tool="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n[]<|im_end|>",
        call="<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        calls_in=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "llama-2": inst(user="<s>[INST] [] [/INST]", tail=" </s>", bos="", head=" ", ask="", content=TRIMMED),
    "llama-3": headers(tool=""),
    "llama-3.1": headers(call=LLAMA_CALL),
    "llama-3.2-vision": headers(call=LLAMA_CALL, content=EITHER),
    "llama-4": Family(
        user="<|header_start|>user<|header_end|>\n\n[]<|eot|>",
        head="<|header_start|>assistant<|header_end|>\n\n",
        tail="<|eot|>",
        eos="<|eot|>",
        bos="<|begin_of_text|>",
        system="<|header_start|>system<|header_end|>\n\n[]<|eot|>",
        tool="<|header_start|>ipython<|header_end|>\n\n[]<|eot|>",
        call=LLAMA_CALL,
        content=EITHER,
    ),
    "tulu-3": Family(
        user="<|user|>\n[]\n",
        head="<|assistant|>\n",
        tail="{% if loop.last %}<|end_of_text|>{% else %}<|end_of_text|>\n{% endif %}",
        eos="<|end_of_text|>",
        system="<|system|>\n[]\n",
    ),
    "olmo-2": Family(
        user="<|user|>\n[]\n",
        head="<|assistant|>\n",
        tail="<|endoftext|>\n",
        eos="<|endoftext|>",
        bos="<|endoftext|>",
        system="<|system|>\n[]\n",
    ),
    "mistral-v1": inst(user=" [INST] [] [/INST]", head=" "),
    "mistral-v2": inst(user="[INST] [] [/INST]", head=" "),
    "mistral-v3": inst(user="[INST] [][/INST]", head=" ", **MISTRAL_TOOLS),
    "mistral-nemo": inst(user="[INST][][/INST]", **MISTRAL_TOOLS),
    "mistral-v7": inst(user="[INST][][/INST]", system="[SYSTEM_PROMPT][][/SYSTEM_PROMPT]", **MISTRAL_TOOLS),
    "magistral": inst(
        user="[INST][][/INST]",
        system="[SYSTEM_PROMPT][][/SYSTEM_PROMPT]",
        think="field",
        think_tags=("[THINK]", "[/THINK]"),
        content=EITHER,
        call="[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
        tool="[TOOL_RESULTS][][/TOOL_RESULTS]",
    ),
    "zephyr": named("<|user|>\n", "<|assistant|>\n", "</s>\n", system="<|system|>\n[]</s>\n"),
    "tinyllama": named("<|user|>\n", "<|assistant|>\n", "</s>\n", system="<|system|>\n[]</s>\n", ask="<|assistant|>"),
    "stablelm-2": named("<|user|>\n", "<|assistant|>\n", "<|endoftext|>\n", system="<|system|>\n[]<|endoftext|>\n"),
    "vicuna": Family(
        user="USER: [] ", head="ASSISTANT: ", tail="</s>", eos="</s>", bos="<s>", system="[]\n\n", ask="ASSISTANT:"
    ),
    "alpaca": Family(
        user="### Instruction:\n[]\n\n", head="### Response:\n", tail="</s>\n\n", eos="</s>", bos="<s>", system="[]\n\n"
    ),
    "solar": named("### User:\n", "### Assistant:\n", "\n\n", system="### System:\n[]\n\n"),
    "deepseek-coder": Family(
        user="### Instruction:\n[]\n",
        head="### Response:\n",
        tail="\n<|EOT|>\n",
        eos="<|EOT|>",
        bos="<｜begin▁of▁sentence｜>",
        system="[]",
        ask="### Response:",
    ),
    "deepseek-v2": Family(
        user="User: []\n\n",
        head="Assistant: ",
        tail="<｜end▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        system="[]\n\n",
        ask="Assistant:",
    ),
    "deepseek-v3": deepseek(call=TEXT_CALL, calls_in=DEEPSEEK_CALLS, tool=DEEPSEEK_RESULT),
    "deepseek-r1": deepseek(
        call=TEXT_CALL, calls_in=DEEPSEEK_CALLS, tool=DEEPSEEK_RESULT, think="cut", ask="<｜Assistant｜><think>\n"
    ),
    "deepseek-v3.1": deepseek(
        call=TEXT_CALL, calls_in=DEEPSEEK_CALLS, tool=DEEPSEEK_RESULT, think="last", think_tags=("<think>", "</think>")
    ),
    "chatglm3": glm(),
    "glm-4": glm(call="{{ f.name }}\n{{ f.arguments | tojson }}"),
    "glm-4.5": glm(call=KEYED_CALL, think="last", content=EITHER),
    "command-r": cohere(content=TRIMMED),
    "command-r7b": cohere(
        call='{"tool_call_id": "{{ c.id }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        calls_in=("<|START_ACTION|>[", "]<|END_ACTION|>"),
        tool="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>",
    ),
    "gemma": gemma(),
    "gemma-3": gemma(content=EITHER, system="<start_of_turn>user\n[]\n\n"),
    "phi-3": named("<|user|>\n", "<|assistant|>\n", "<|end|>\n", eos="<|endoftext|>", close="<|endoftext|>"),
    "phi-4": Family(
        user="<|im_start|>user<|im_sep|>[]<|im_end|>",
        head="<|im_start|>assistant<|im_sep|>",
        tail="<|im_end|>",
        eos="<|im_end|>",
        system="<|im_start|>system<|im_sep|>[]<|im_end|>",
    ),
    "phi-4-mini": named(
        "<|user|>",
        "<|assistant|>",
        "<|end|>",
        eos="<|endoftext|>",
        system="<|system|>[]<|end|>",
        close="<|endoftext|>",
        **PHI_TOOLS,
    ),
    "falcon": Family(
        user="User: []\n\n", head="Assistant: ", tail="\n\n", eos="<|endoftext|>", system="[]\n\n", ask="Assistant:"
    ),
    "falcon-3": named(
        "<|user|>\n", "<|assistant|>\n", "\n", eos="<|endoftext|>", system="<|system|>\n[]\n", close="<|endoftext|>"
    ),
    "granite-3": Family(
        user="<|start_of_role|>user<|end_of_role|>[]<|end_of_text|>\n",
        head="<|start_of_role|>assistant<|end_of_role|>",
        tail="<|end_of_text|>\n",
        eos="<|end_of_text|>",
        system="<|start_of_role|>system<|end_of_role|>[]<|end_of_text|>\n",
        tool="<|start_of_role|>tool_response<|end_of_role|>[]<|end_of_text|>\n",
        call=JSON_CALL,
        calls_in=("<|tool_call|>[", "]"),
    ),
    "nemotron-mini": Family(
        user="<extra_id_1>User\n[]\n",
        head="<extra_id_1>Assistant\n",
        tail="\n",
        eos="</s>",
        system="<extra_id_0>System\n[]\n\n",
    ),
    "exaone": Family(
        user="[|user|][]\n",
        head="[|assistant|]",
        tail="[|endofturn|]\n",
        eos="[|endofturn|]",
        system="[|system|][][|endofturn|]\n",
        special=("[|user|]", "[|assistant|]", "[|system|]", "[|endofturn|]"),
    ),
    "lfm2": chatml(
        bos="<|startoftext|>",
        call=PYTHON_CALL,
        calls_in=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        tool="<|im_start|>tool\n<|tool_response_start|>[]<|tool_response_end|><|im_end|>\n",
    ),
    "minimax-m2": Family(
        user="]~b]user\n[][e~[\n",
        head="]~b]ai\n",
        tail="[e~[\n",
        eos="[e~[",
        system="]~!b[]~b]system\n[][e~[\n",
        tool="]~b]tool\n<response>[]</response>[e~[\n",
        call=INVOKE_CALL,
        calls_in=("\n<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        think="last",
        special=("]~b]", "[e~[", "]~!b["),
    ),
    "harmony": Family(
        user="<|start|>user<|message|>[]<|end|>",
        head="<|start|>assistant",
        tail=(
            "{% if not m.tool_calls %}{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>"
            "{% endif %}{% endif %}"
        ),
        eos="<|return|>",
        system="<|start|>developer<|message|>[]<|end|>",
        tool="<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>[]<|end|>",
        content="('<|channel|>final<|message|>' + m.content if m.role == 'assistant' else m.content)",
        call=(
            "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json"
            "<|message|>{{ f.arguments | tojson }}<|call|>"
        ),
        think="last",
        think_tags=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    "dolly": Family(
        user="### Instruction:\n[]\n\n",
        head="### Response:\n",
        tail="\n### End\n",
        eos="<|endoftext|>",
        system="[]\n\n",
    ),
    "openchat": Family(
        user="GPT4 Correct User: []<|end_of_turn|>",
        head="GPT4 Correct Assistant: ",
        tail="<|end_of_turn|>",
        eos="<|end_of_turn|>",
        bos="<s>",
        system="[]<|end_of_turn|>",
        ask="GPT4 Correct Assistant:",
    ),
    "baichuan2": Family(
        user="<reserved_106>[]",
        head="<reserved_107>",
        tail="",
        eos="</s>",
        system="[]",
        special=("<reserved_106>", "<reserved_107>"),
    ),
    "starchat": named(
        "<|user|>\n", "<|assistant|>\n", "<|end|>\n", eos="<|endoftext|>", system="<|system|>\n[]<|end|>\n"
    ),
    "xlam-hermes-text": chatml(call="\n<tool_call>\n{{ f.name + '(' + f.arguments + ')' }}\n</tool_call>"),
    "seed-oss": Family(
        user="<seed:bos>user\n[]<seed:eos>",
        head="<seed:bos>assistant\n",
        tail="<seed:eos>",
        eos="<seed:eos>",
        bos="",
        system="<seed:bos>system\n[]<seed:eos>",
        think="field",
        think_tags=("<seed:think>", "</seed:think>"),
        special=("<seed:bos>", "<seed:eos>"),
    ),
}
