"""An agent file as it is written for vLLM's objects: token ids from the tokenizer called as a function, sampling
parameters that are set in place, answers read as `outputs[0]`."""

SOURCE = '''
import copy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    """Asks up to three times; the answer "yes" gives 1."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        def ids_of(text):
            return hf_tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()

        room = max_length - sampling_params.max_tokens
        tokens = ids_of(prompt)[-room:]
        logprobs = [0.0] * len(tokens) if sampling_params.logprobs is not None else None
        ranges, texts, reward = [], [], 0.0
        for turn in range(3):
            sampling_params.max_tokens = min(20, max_length - len(tokens))
            if sampling_params.max_tokens <= 0:
                break
            out = await llm_engine.generate(tokens, copy.deepcopy(sampling_params))
            assert out.prompt_token_ids == tokens and out.finished
            answer = out.outputs[0]
            texts.append(answer.text)
            ranges.append((len(tokens), len(tokens) + len(answer.token_ids)))
            tokens = tokens + answer.token_ids
            if logprobs is not None:
                for token, entry in zip(answer.token_ids, answer.logprobs):
                    logprobs.append(entry[token].logprob)
            if "yes" in answer.text:
                reward = 1.0
                break
            feedback = ids_of(f" turn {turn}: no. ")
            tokens = tokens + feedback
            if logprobs is not None:
                logprobs.extend([0.0] * len(feedback))
            sampling_params.temperature = 0.5
            sampling_params.stop = ["yes"]
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": logprobs,
            "reward": reward,
            "scores": reward,
            "extra_logs": {"turns": len(ranges), "characters": sum(map(len, texts))},
        }
'''
