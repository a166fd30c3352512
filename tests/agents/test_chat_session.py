"""Chat sessions: sampled tokens stay, only what is new is tokenised, broken histories branch."""

import asyncio
import json

import pytest

from openrlhf.agents.chat.answer import Answer, make_choice
from openrlhf.agents.chat.fields import ApiError
from openrlhf.agents.chat.messages import message_key, read_messages
from openrlhf.agents.chat.render import ChatRenderer
from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.chat.wires.completions import message_of
from openrlhf.agents.chat.wires.completions_request import read_chat_request
from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings, SampleEngine
from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.agents.testing import ScriptedEngine
from support.agents_templates import (
    CHATML,
    DEFAULT_SYSTEM,
    LLAMA3,
    MISTRAL,
    NO_GENERATION_PROMPT,
    PARTS,
    QWEN3,
    TRIMMING,
    TemplateTokenizer,
)

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Chat:
    """A client without HTTP: `say` sends the whole history and keeps the reply in it."""

    def __init__(self, script, template=CHATML, eos="<|im_end|>", max_length=100_000, max_turns=1000):
        self.tokenizer = TemplateTokenizer(template, eos)
        self.scripted = ScriptedEngine(script, tokenizer=self.tokenizer)
        engine = SampleEngine(
            self.scripted, settings=EpisodeSettings(agent=AgentConfig(max_turns=max_turns, client_sampling="honour"))
        )
        self.session = ChatSession(ChatRenderer(self.tokenizer), self.tokenizer, engine, SamplingParams(), max_length)
        self.messages = []

    def ask(self, messages, **fields):
        body = {"model": "policy", "messages": messages, **fields}
        request = read_chat_request(json.loads(json.dumps(body)), self.session)
        plan = self.session.plan(request.conversation, request.tools, request.options)
        generation = asyncio.run(self.session.generate(plan, request.sampling))
        choice = make_choice(self.session, plan, request, generation)
        answer = Answer(session=self.session, plan=plan, call=request, choices=[choice])
        answer.commit()
        return choice

    def say(self, text, role="user", **fields):
        self.messages.append({"role": role, "content": text})
        choice = self.ask(self.messages, **fields)
        self.messages.append(message_of(choice))
        return choice

    @property
    def branches(self):
        return [b.recorder for b in self.session.branches]

    def sampled(self, recorder):
        return [recorder.token_ids[t.start : t.end] for t in recorder.turns]


APPEND_ONLY = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "default system": (DEFAULT_SYSTEM, "<|im_end|>"),
    "trimming": (TRIMMING, "<|im_end|>"),
    "no generation prompt": (NO_GENERATION_PROMPT, "<|im_end|>"),
    "parts": (PARTS, "<|im_end|>"),
}


@pytest.mark.parametrize(("template", "eos"), APPEND_ONLY.values(), ids=APPEND_ONLY)
def test_append_only_templates_keep_one_branch(template, eos):  # F17, B071, B030
    chat = Chat(["first", "second", "third"], template, eos)
    for text in ("a", "b", "c"):
        chat.say(text)
    (recorder,) = chat.branches
    texts = [chat.tokenizer.decode(ids) for ids in chat.sampled(recorder)]
    assert texts == [f"first{eos}", f"second{eos}", f"third{eos}"]
    rendered = chat.tokenizer.apply_chat_template(chat.messages[:-1], add_generation_prompt=True)
    if template not in (PARTS,):
        assert recorder.token_ids[: recorder.turns[-1].start] == rendered
    assert recorder.token_ids.count(chat.tokenizer.special_ids["<|begin_of_text|>"]) == (template == LLAMA3)
    assert chat.session.template_breaks == 0


def test_long_session_tokenises_only_what_is_new(monkeypatch):
    chat = Chat(["an answer"])
    encode, tokenized = chat.tokenizer.encode, []

    def counted(text, add_special_tokens=True):
        ids = encode(text, add_special_tokens)
        tokenized.append(0 if text == "an answer" else len(ids))  # that one is the scripted engine's
        return ids

    monkeypatch.setattr(chat.tokenizer, "encode", counted)
    for i in range(128):
        chat.say(f"question {i}")
    (recorder,) = chat.branches
    new = sum(1 for t in recorder.trainable if not t)
    assert 1 <= sum(tokenized) / new <= 1.05
    assert len(recorder.turns) == 128


def test_text_that_tokenises_otherwise_is_kept_as_sampled():  # B074, B081
    ids = [104, 300, 105]  # 300 decodes to a placeholder that would be tokenised as several ids
    generation = Generation(token_ids=[*ids, 257], logprobs=[-0.1] * 4, versions=[2] * 4, finish_reason="stop")
    chat = Chat([generation, "b"])
    choice = chat.say("x")
    chat.say("y")
    (recorder,) = chat.branches
    assert chat.sampled(recorder)[0] == [*ids, 257]
    assert recorder.versions[recorder.turns[0].start] == 2
    assert choice.text == "h<id_300>i"
    assert chat.session.template_breaks == 0


def test_dropped_reasoning_branches():  # B073, F17
    chat = Chat(["<think>\nlong\n</think>\n\none", "<think>\nmore\n</think>\n\ntwo", "three"], QWEN3)
    for text in ("a", "b", "c"):
        chat.say(text)
    assert len(chat.branches) == 3
    assert chat.session.template_breaks == 2
    for recorder, answer in zip(chat.branches, ("one", "two", "three"), strict=True):
        (ids,) = chat.sampled(recorder)
        assert chat.tokenizer.decode(ids).endswith(f"{answer}<|im_end|>")
    seen = chat.tokenizer.decode(chat.branches[1].token_ids[: chat.branches[1].prompt_length])
    assert "long" not in seen  # the model saw it without


def test_reasoning_within_a_tool_loop_is_kept():  # B072
    call = '<think>\nt\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    chat = Chat([call, "it is 2"], QWEN3)
    choice = chat.say("1+1?", tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    chat.messages.append({"role": "tool", "tool_call_id": choice.calls[0]["id"], "content": "2"})
    chat.ask(chat.messages, tools=TOOLS)
    (recorder,) = chat.branches
    text = chat.tokenizer.decode(recorder.token_ids)
    assert text.count('{"name": "add", "arguments": {"a": 1}}') == 1
    assert chat.session.template_breaks == 0


def test_tool_call_spelled_otherwise_than_the_template_does():  # B072: kept as sampled
    call = '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>'
    chat = Chat([call, "2"], QWEN3)
    choice = chat.say("1+1?", tools=TOOLS)
    chat.messages.append({"role": "tool", "tool_call_id": choice.calls[0]["id"], "content": "2"})
    chat.ask(chat.messages, tools=TOOLS)
    (recorder,) = chat.branches
    assert chat.tokenizer.decode(chat.sampled(recorder)[0]) == f"{call}<|im_end|>"


def test_trimming_template_branches_only_where_it_trims():  # F17
    chat = Chat(["plain", " padded ", "end"], TRIMMING)
    for text in ("a", "b", "c"):
        chat.say(text)
    assert [len(r.turns) for r in chat.branches] == [2, 1]
    assert chat.session.template_breaks == 1


def test_edited_history_is_a_sample_of_its_own():  # B080
    chat = Chat(["a1", "a2", "a3", "a4"])
    chat.say("u1")
    chat.say("u2")
    edited = [
        {"role": "user", "content": "u1"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "u2"},
    ]
    chat.ask(edited)
    assert [len(r.turns) for r in chat.branches] == [2, 1]
    assert chat.session.template_breaks == 0
    other = [*chat.messages[:2], {"role": "user", "content": "other"}]
    chat.ask(other)  # goes on from the first reply; its tokens are reused, but trained on once only
    forked = chat.branches[2]
    first = chat.branches[0]
    end = first.turns[0].end
    assert forked.token_ids[:end] == first.token_ids[:end]
    assert sum(forked.trainable) == forked.turns[0].end - forked.turns[0].start


def test_regenerated_and_parallel_calls_are_branches():  # O08
    chat = Chat(["a1", "a2", "a3"])
    chat.say("u1")
    request = [{"role": "user", "content": "u2"}]
    conversation = read_messages([*chat.messages, *request])
    plans = [chat.session.plan(conversation, None, {}) for _ in range(2)]
    for plan in plans:
        generation = asyncio.run(chat.session.generate(plan, SamplingParams()))
        chat.session.commit(plan, generation, message_key({"role": "assistant", "content": "x"}), "x")
    assert [len(r.turns) for r in chat.branches] == [2, 1]
    assert [sum(r.trainable) for r in chat.branches] == [6, 3]


def test_a_failed_call_leaves_the_session_as_it_was():  # O08
    chat = Chat(["a1", RuntimeError("engine down"), "a2"])
    chat.say("u1")
    with pytest.raises(RuntimeError):
        chat.ask([*chat.messages, {"role": "user", "content": "u2"}])
    chat.say("u2")
    (recorder,) = chat.branches
    assert len(recorder.turns) == 2


def test_answer_cut_by_length_is_closed_by_the_template():
    chat = Chat([[104, 105, 106], "b"])
    choice = chat.say("x", max_tokens=2)
    assert choice.finish_reason == "length"
    chat.say("y")
    (recorder,) = chat.branches
    assert chat.sampled(recorder)[0] == [104, 105]
    assert recorder.token_ids[recorder.turns[0].end] == chat.tokenizer.eos_token_id
    assert recorder.trainable[recorder.turns[0].end] == 0  # the system's token, not the policy's


@pytest.mark.parametrize("prompt", [16, 20])
def test_prompt_longer_than_the_context(prompt):  # B086
    overhead = len(
        TemplateTokenizer().apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True)
    )
    chat = Chat(["x"], max_length=overhead + 16)
    with pytest.raises(
        ApiError, match=f"the prompt has {overhead + prompt} tokens, the maximum context length is"
    ) as e:
        chat.ask([{"role": "user", "content": "a" * prompt}])
    assert (e.value.status, e.value.code) == (400, "context_length_exceeded")
    assert chat.session.stop_reason.truncated
    chat.ask([{"role": "user", "content": "a" * 15}], max_tokens=10**9)
    assert chat.scripted.requests[-1].sampling.max_tokens == 1


def test_turn_limit():
    chat = Chat(["x"], max_turns=2)
    chat.say("a")
    chat.say("b")
    with pytest.raises(ApiError, match="used its 2 turns"):
        chat.say("c")
    assert chat.session.stop_reason == "max_turns"


def test_template_refusal_is_a_400():  # B082
    chat = Chat(["x"], MISTRAL, "</s>")
    for messages, text in (
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "no system role here"),
        ([{"role": "user", "content": "u"}, {"role": "user", "content": "u"}], "roles must alternate"),
    ):
        with pytest.raises(ApiError, match=text) as error:
            chat.ask(messages)
        assert error.value.status == 400


def test_no_template_is_named():  # F17
    with pytest.raises(ValueError, match="no chat template"):
        ChatRenderer(TemplateTokenizer(None))


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_arguments_on_the_wire_and_as_mapping(arguments):  # B083, F11
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}
    text = ChatRenderer(TemplateTokenizer(QWEN3)).render(read_messages([message]).messages)
    assert '{"name": "f", "arguments": {"city": "Paris"}}' in text


def test_calls_of_a_template_that_writes_them_beside_null_only():
    content = "{% if m.content is none %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}"
    renderer = ChatRenderer(TemplateTokenizer("{% for m in messages %}" + content + "{% endfor %}"))
    call = {"function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    messages = read_messages([{"role": "assistant", "content": "", "tool_calls": [call]}]).messages
    renderer.check_calls(messages)
    assert renderer.render(messages) == '{"name": "f", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize("arguments", ["", None])
def test_empty_arguments(arguments):  # B083
    call = {"function": {"name": "f", "arguments": arguments}}
    message = read_messages([{"role": "assistant", "tool_calls": [call]}]).messages[0]
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["[]", '"x"', "{bad", 3])
def test_bad_arguments(arguments):  # B083
    with pytest.raises(ApiError, match="arguments"):
        read_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])


def test_images_are_collected_in_order():
    content = [
        {"type": "image_url", "image_url": {"url": "data:1"}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "data:2"}},
    ]
    conversation = read_messages([{"role": "user", "content": content}])
    assert conversation.images == ["data:1", "data:2"]
    text = ChatRenderer(TemplateTokenizer(PARTS)).render(conversation.messages)
    assert text == "<|im_start|>user\n<|image|>and<|image|><|im_end|>\n<|im_start|>assistant\n"
    plain = read_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert plain.messages[0]["content"] == "ab"


def test_stop_string_across_a_token_border():  # B088
    generation = Generation(token_ids=[97, 98, 35, 35], logprobs=[-1.0] * 4, versions=[0] * 4, finish_reason="stop")
    for stop in ("#", ["#"], ["zz", "#"]):
        chat = Chat([generation])
        choice = chat.say("x", stop=stop)
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", "#")
        assert chat.sampled(chat.branches[0]) == [[97, 98, 35, 35]]
        assert chat.scripted.requests[0].sampling.stop == tuple([stop] if isinstance(stop, str) else stop)


def test_phantom_ids_have_a_placeholder():  # B089
    chat = Chat([Generation(token_ids=[97, 9999], logprobs=[-1.0] * 2, versions=[0] * 2, finish_reason="length")])
    assert chat.say("x", logprobs=True).text == "a<id_9999>"
