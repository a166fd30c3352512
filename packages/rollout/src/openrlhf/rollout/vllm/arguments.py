"""Our terms in vLLM's: the arguments and the environment of an engine, sampling parameters, weight versions.

vLLM itself is imported only where a request is made. Which arguments its engine takes is read from the source of the
installed version, since importing it takes seconds.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from openrlhf.agents.engine import SamplingParams
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.images import decode_image, image_digest
from openrlhf.rollout.requests import GenerateRequest

RESERVED_ENGINE_ARGS = {
    "model": "`engine.model`",
    "dtype": "`engine.dtype`",
    "tensor_parallel_size": "`engine.tensor_parallel_size`",
    "enforce_eager": "`engine.enforce_eager`",
    "gpu_memory_utilization": "`engine.gpu_memory_utilization`",
    "enable_prefix_caching": "`engine.enable_prefix_caching`",
    "enable_sleep_mode": "`engine.enable_sleep`",
    "max_model_len": "`engine.max_model_len`",
    "seed": "`engine.seed`",
    "weight_transfer_config": "`engine.sync_backend`",
    "enable_lora": "`lora_push`",
    "max_lora_rank": "`lora_push`",
    "max_loras": "`lora_push`",
    "max_cpu_loras": "`lora_push`",
    "lora_dtype": "`lora_push`",
    "lora_target_modules": "`lora_push`",
    "logprobs_mode": "no parameter: training needs processed log-probs",
    "skip_tokenizer_init": "no parameter: the engine needs the end-of-sequence token",
}
"""Arguments that `engine_args` may not set, and what sets them instead: another field of the engine's specification."""

ADAPTER_ID = 1
"""The number under which an engine knows the one adapter that it serves."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM can be told as the largest rank."""
ADAPTER_WORKER = "openrlhf.rollout.weights.adapter.AdapterWorker"
ADAPTER_PATH = "/a weight push brings it"
"""In the place of an adapter's folder: vLLM loads what it does not have, and must fail rather than find something."""
NOT_TRAINED_ON = {"video": 0, "audio": 0}
"""Other inputs of models that take images."""
SUPPRESSED = -100.0
"""Added to a logit that must not be sampled: the most that vLLM takes. exp(-100) is nothing beside 1 in float32."""
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc keeps memory that a process frees, up to 4 GiB. By default it gives large blocks back at once, and every push
fetches as much from the kernel again, page by page: a quarter of the time of a reload."""
SOURCE = "engine/arg_utils.py"
CLASS = "AsyncEngineArgs"
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Kinds of layers, as configurations name them, that keep nothing but a KV cache."""
STATE_HINTS = ("mamba", "ssm", "linear_", "conv", "recurrent", "rwkv", "lru", "hybrid")
"""In names of settings of models with other kinds of layers."""
_SIMPLE = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),)}


def vllm_args(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs, without the weight-transfer configuration (an object).

    Raises ValueError for one of the user's that is not his to set.
    """
    for key in spec.engine_args:
        if key in RESERVED_ENGINE_ARGS:
            raise ValueError(f"`engine.engine_args` must not set {key!r}; use {RESERVED_ENGINE_ARGS[key]}")
    text_only = spec.max_images_per_prompt == 0
    args: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": caches_prefixes(spec),
        "seed": spec.seed,
        "trust_remote_code": spec.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # 0 keeps image inputs (and their warm-up) out of multimodal models that train on text alone.
        "limit_mm_per_prompt": {"image": spec.max_images_per_prompt, **({} if text_only else NOT_TRAINED_ON)},
        "block_size": spec.block_size or (32 if spec.device == "cpu" else None),
    }
    if spec.device == "cuda":
        args["gpu_memory_utilization"] = spec.gpu_memory_utilization
        args["enable_sleep_mode"] = spec.enable_sleep
    else:
        # vLLM 0.32 (`_bookkeeping_sync`) rewinds the generator of a seeded request when a step held only a part of
        # its prompt; generators on CPU can't rewind and the engine dies. Goes when vLLM leaves them alone.
        args["enable_chunked_prefill"] = False
        args["skip_mm_profiling"] = True  # measures device memory
    if spec.tensor_parallel_size > 1:
        args["distributed_executor_backend"] = spec.executor
    if spec.lora_rank:
        args |= adapter_args(spec.lora_rank, spec.lora_targets)
        if "worker_extension_cls" in spec.engine_args:
            raise ValueError("`engine.engine_args` must not set 'worker_extension_cls' with `lora_push` adapter")
    if spec.max_model_len is not None:
        args["max_model_len"] = spec.max_model_len
    if spec.max_num_seqs is not None:
        args["max_num_seqs"] = spec.max_num_seqs
    return {**args, **spec.engine_args}


def adapter_args(rank: int, targets: Sequence[str]) -> dict[str, Any]:
    """Arguments of an engine that serves one adapter of this rank. Raises ValueError where vLLM has no room for it.

    targets: modules that have a part of it, by the ends of their names; none: all linear layers.
    """
    room = next((most for most in ADAPTER_RANKS if most >= rank), None)
    if room is None:
        raise ValueError(f"vLLM serves adapters up to rank {ADAPTER_RANKS[-1]}, got {rank!r}: use `lora_push` merged")
    args = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "worker_extension_cls": ADAPTER_WORKER}
    names = sorted({target.rpartition(".")[2] for target in targets})
    return args | ({"lora_target_modules": names} if names else {})


def caches_prefixes(spec: EngineSpec) -> bool:
    """Whether samples of a group share the KV cache of their prompt.

    On CPUs, where prefill is slow, they do without being asked to: eight samples of a prompt of 200 tokens take two
    fifths of the time, with the same log-probs, bit for bit (tests/rollout). Not where layers carry a state (vLLM's
    cache of those is an experiment), nor where the model's configuration is not at hand.
    """
    return spec.enable_prefix_caching or (spec.device == "cpu" and _attends_only(spec.model))


@functools.cache
def _attends_only(model: str) -> bool:
    file = Path(model) / "config.json"
    if not file.is_file():
        return False
    config = json.loads(file.read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    kinds = {*(config.get("layer_types") or ()), *(config.get("layers_block_type") or ())}
    return kinds <= ATTENTION and not any(hint in key for key in config for hint in STATE_HINTS)


def environment(spec: EngineSpec) -> dict[str, str]:
    """Defaults of environment variables that must be set before vLLM is imported; the user's values win.

    CPU: as many OpenMP threads as the specification says (vLLM lets nobody change their number later), no core binding
    (engines would all bind to the same cores, and those are the learner's too while the engine waits), a small fixed
    KV cache (else a large part of the machine's memory).
    VLLM_ENABLE_V1_MULTIPROCESSING=0 saves a worker process when there is one worker. Eager engines on CPU switch
    torch.compile off altogether: vLLM compiles its sampler helpers even then, 20 s at the first request.
    vLLM's warnings are about settings chosen here on purpose; its errors are raised as exceptions too.
    """
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if spec.device == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env["OMP_NUM_THREADS"] = str(spec.cpu_threads)
        env |= KEPT_MEMORY
        env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn" if spec.engine_args.get("numa_bind") else "fork"
        if spec.enforce_eager:
            env["TORCHDYNAMO_DISABLE"] = "1"
    elif spec.full_determinism:
        env["VLLM_BATCH_INVARIANT"] = "1"
    if spec.sync_backend == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA IPC handles go to the workers pickled
    if spec.tensor_parallel_size == 1:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return env


def to_vllm_prompt(request: GenerateRequest, ids: list[int], spec: EngineSpec, version: int) -> dict[str, Any]:
    """vLLM's own prompt of a request with these token ids. Cached prefixes of older weights must never match it."""
    prompt: dict[str, Any] = {"prompt_token_ids": ids}
    if request.images:
        prompt["multi_modal_data"] = {"image": [decode_image(content) for content in request.images]}
        # Names for vLLM's caches: features of an older vision encoder must never match.
        names = [f"v{version}-{image_digest(content)}" for content in request.images]
        prompt["multi_modal_uuids"] = {"image": names}
    else:
        prompt["type"] = "token"  # nothing left to pre-process, so vLLM skips its thread pool
    if caches_prefixes(spec):
        prompt["cache_salt"] = f"v{version}"  # an emptied cache is not enough: paused requests still hold their blocks
    return prompt


def to_vllm_sampling(sampling: SamplingParams, suppressed: Sequence[int] = ()) -> Any:
    """vLLM's own sampling parameters, every one set explicitly, for one sample (n = 1).

    Text is only decoded where stop strings need it. The stop string's tokens are part of the sample.
    suppressed: token ids that are never sampled.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structure = StructuredOutputsParams(structural_tag=sampling.structure) if sampling.structure else None
    return VllmSamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        logit_bias=dict.fromkeys(suppressed, SUPPRESSED) or None,
        logprobs=sampling.top_logprobs,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=structure,
        skip_clone=True,  # made for one request, and changed by nobody
    )


def adapter_request(version: int) -> Any:
    """vLLM's request for the adapter of a weight version.

    Its name is a part of vLLM's keys of cached prefixes: under one name, blocks of older weights would match.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"v{version}", ADAPTER_ID, ADAPTER_PATH)


def sampled_logprobs(flat: Any, top: int) -> tuple[list[float], Sequence[Sequence[tuple[int, float]]]]:
    """Of vLLM's flat log-probs those of the sampled tokens, and of the `top` likeliest tokens of each place.

    A place has the sampled token first, then the likeliest ones, among which it may be again.
    """
    if not top:
        return list(flat.logprobs), ()
    pairs = list(zip(flat.token_ids, flat.logprobs, strict=True))
    places = [pairs[i:j] for i, j in zip(flat.start_indices, flat.end_indices, strict=True)]
    return [place[0][1] for place in places], [place[1 : top + 1] for place in places]


def expand_versions(spans: Sequence[Any] | None, length: int, current: int) -> list[int]:
    """Weight version per token from vLLM's spans (version, start, end)."""
    if not spans:
        return [current] * length
    versions: list[int] = []
    for span in spans:
        assert span.start == len(versions), "vLLM's weight version spans leave a gap"
        versions.extend([int(span.version)] * (span.end - span.start))
    assert len(versions) == length, "vLLM's weight version spans do not cover the sample"
    return versions


@functools.cache
def engine_arguments() -> Mapping[str, frozenset[str]]:
    """Name of each argument -> names of the types that it may have, as far as all of them are simple ones.

    The fields of vLLM's dataclass `AsyncEngineArgs` and of its base. Empty where vLLM is not installed, or is laid out
    in another way: then the engine itself has the say.
    """
    found = importlib.util.find_spec("vllm")  # finds it, does not import it
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder) / SOURCE
        if file.is_file():
            return _fields(ast.parse(file.read_text(encoding="utf-8")), CLASS)
    return {}


def unknown_argument(name: str) -> str:
    """What is wrong with an argument's name, with the nearest ones that vLLM has; empty for one that it knows."""
    known = engine_arguments()
    if not known or name in known:
        return ""
    plain = name.lstrip("-").replace("-", "_").lower()
    near = [plain] if plain in known else get_close_matches(plain, list(known), n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"vLLM has no engine argument {name!r}{hint}"


def wrong_type(name: str, value: Any) -> str:
    """What is wrong with the type of an argument's value, where vLLM takes simple types only; else empty."""
    types = engine_arguments().get(name, frozenset())
    if not types or type(value) in {kind for word in types for kind in _SIMPLE[word]}:
        return ""
    return f"{name!r} takes {' or '.join(sorted(types - {'None'}))}, got {value!r}"


def _fields(module: ast.Module, name: str) -> dict[str, frozenset[str]]:
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return {}
    found: dict[str, frozenset[str]] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name):
            found |= _fields(module, base.id)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            words = [part.strip() for part in ast.unparse(node.annotation).split("|")]
            if not words[0].startswith("ClassVar"):
                found[node.target.id] = frozenset(words) if set(words) <= _SIMPLE.keys() else frozenset()
    return found
