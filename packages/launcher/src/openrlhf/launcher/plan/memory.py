"""Memory per GPU: parameters, gradients, optimiser states, activations, log-probs, KV cache, and when each is there.

Parameters, gradients and optimiser states follow DeepSpeed's ZeRO (arXiv:1910.02054, with DeepSpeed's own copies,
`tests/launcher/test_plan_measured.py`);
activations are an estimate (arXiv:2205.05198, for flash attention and gated MLPs), and so is what a GPU program costs
before it holds anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from openrlhf.launcher.config import ActorConfig, CriticConfig, RefConfig, RewardConfig, TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.placement import ENGINE, JUDGE, SECTIONS, groups, section
from openrlhf.launcher.plan.shape import ModelShape
from openrlhf.learner.spec import Role

GENERATION, EXPERIENCE, TRAINING, STEP = "generation", "make_experience", "training", "optimizer_step"
PHASES = (GENERATION, EXPERIENCE, TRAINING, STEP)
"""training: forwards and backwards, gradients of earlier micro-batches there; optimizer_step: inside the update."""

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2, "float16": 2}

MASTER, MOMENT = 4, 4
"""Bytes per parameter of the fp32 copy that ZeRO 1-3 steps on (in fp32 training too), and of one moment."""

FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight of 4-bit NormalFloat: half a byte, and per 64 weights a scale in 8 bits, which 256 of them share a
float32 scale for (arXiv:2305.14314, section 3)."""

PERSISTENT = 10**5
"""Elements up to which ZeRO-3 leaves a parameter whole on every rank once it was needed: DeepSpeed's own default."""

LOGIT_CHUNKS = 3
LOGIT_CHUNK_BYTES = 64 * 2**20
"""Log-probs are computed over chunks of logits of this size (`core.logprobs`); about three of them live at a time."""

PROGRAM_BYTES = int(1.5 * 2**30)
"""What a process on a GPU takes before it holds a tensor: context, kernels, communication buffers. Estimated."""

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Component:
    """Bytes on every GPU of a group (`roles`) in the phases named."""

    group: str
    role: str
    name: str
    bytes: int
    phases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a GPU (or, without GPUs, the host for one process) offers. kv_bytes: the CPU engines' fixed KV cache."""

    device_bytes: int | None
    kv_bytes: int = 0


def memory(c: TrainPPOConfig, shapes: dict[str, ModelShape], budget: Budget) -> list[Component]:
    """All components of a resolved configuration. `shapes` has the model of each role that the run has."""
    found: list[Component] = []
    for group in groups(c):
        for member in group.members:
            if member == ENGINE:
                found += _engine(c, shapes[Role.POLICY], str(group), budget)
            elif member == JUDGE:
                found += _engine(_as_judge(c), shapes[JUDGE], str(group), budget)
            else:
                found += _model(c, shapes[member], str(group), Role(member))
            if member == Role.POLICY and c.has_reference:
                found += _taught(c, shapes.get(Role.REFERENCE, shapes[Role.POLICY]), str(group))
    return found


def gradient_bytes(parameters: int, *, stage: int, itemsize: int, world: int, stepping: bool = False) -> int:
    """Gradients of one rank between two micro-batches, or inside the optimiser step: sharded from stage 2 on.

    Inside the step DeepSpeed has them in fp32 for its fp32 weights, sharded from stage 1 on. Stages 0 (in mixed
    precision) and 3 keep the others beside them.
    """
    shards = world if stage >= 2 or (stage == 1 and stepping) else 1
    own = itemsize * math.ceil(parameters / shards)
    if not stepping or (stage == 0 and itemsize == MASTER):
        return own
    copy = MASTER * math.ceil(parameters / shards)
    return copy if stage in (1, 2) else own + copy


def optimizer_bytes(parameters: int, *, stage: int, itemsize: int, world: int, matrices: int = 0) -> int:
    """Optimiser states of one rank: two Adam moments, or one for `matrices` under Muon, and the fp32 copy.

    Stage 0 in fp32 steps on the parameters themselves, every other combination on an fp32 copy.
    """
    moments = MOMENT * (2 * parameters - matrices)
    master = 0 if stage == 0 and itemsize == MASTER else MASTER * parameters
    return math.ceil((moments + master) / (world if stage >= 1 else 1))


def parameter_bytes(parameters: int, *, stage: int, itemsize: int, world: int) -> int:
    """Parameters of one rank: sharded by stage 3 only."""
    return itemsize * (math.ceil(parameters / world) if stage == 3 else parameters)


def persistent_bytes(shape: ModelShape, *, stage: int, itemsize: int) -> int:
    """Parameters that stage 3 leaves whole on every rank, beside its shards, from the first forward on."""
    return itemsize * shape.parameters_in_tensors(up_to=PERSISTENT) if stage == 3 else 0


def rank_parameters(shape: ModelShape, tensor_parallel: int) -> int:
    """Parameters on one rank before ZeRO: tensor parallelism cuts the matrices of the layers, the rest stays whole."""
    matrices = shape.layers * shape.layer_matrices
    return shape.parameters - matrices + math.ceil(matrices / tensor_parallel)


def base_bytes(shape: ModelShape, *, stage: int, itemsize: int, world: int) -> int:
    """Frozen weights in 4 bits: the matrices of the layers (not of experts); the rest stays in `itemsize`."""
    packed = shape.layers * sum(a * b for sizes in shape.linear.values() for a, b in sizes)
    rest = parameter_bytes(shape.parameters - packed, stage=stage, itemsize=itemsize, world=world)
    return math.ceil(FOUR_BIT * packed) + rest


def tokens_per_forward(c: TrainPPOConfig, phase: str) -> int:
    """Tokens of the largest micro-batch of a phase: the budget of all ranks that work on it, or full-length samples."""
    if c.train.dynamic_batch_enable:
        budget = c.train.max_tokens_per_gpu if phase == TRAINING else c.rollout.max_tokens_per_gpu
        return max((budget or 0) * c.ds.ranks_per_sample, c.data.max_len)
    return c.data.max_len * (c.train.micro_batch_size if phase == TRAINING else c.rollout.micro_batch_size)


def rank_tokens(c: TrainPPOConfig, phase: str) -> int:
    """Those of them that one rank has: all, or its part of a row that is cut over a sequence group."""
    return math.ceil(tokens_per_forward(c, phase) / c.ds.ring_attn_size)


def activation_bytes(shape: ModelShape, tokens: int, itemsize: int, *, checkpointing: bool) -> int:
    """Stored activations of one training forward. With checkpointing: every layer's input and one layer's insides."""
    width = shape.intermediate * max(1, shape.active_experts)
    inside = 4 * shape.hidden + 2 * shape.query_size + 2 * shape.kv_size + 4 * width
    layer = tokens * itemsize * inside
    return shape.layers * tokens * itemsize * shape.hidden + layer if checkpointing else shape.layers * layer


def forward_bytes(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Activations of a forward without a backward: one layer's."""
    return activation_bytes(shape, tokens, itemsize, checkpointing=True) // (shape.layers + 1)


def logit_bytes(tokens: int, vocab: int) -> int:
    """Logits that live at a time, in fp32 chunks."""
    return min(LOGIT_CHUNKS * LOGIT_CHUNK_BYTES, LOGIT_CHUNKS * 4 * tokens * vocab)


def _model(c: TrainPPOConfig, shape: ModelShape, group: str, role: Role) -> list[Component]:
    own = section(c, role)
    stage, itemsize, world = c.ds.zero_stage, ITEMSIZE[c.ds.param_dtype], own.world_size
    tp = c.ds.tensor_parallel_size
    count, world = rank_parameters(shape, tp), max(1, world // tp)
    offloaded = isinstance(own, RefConfig | RewardConfig) and own.offload
    here = (EXPERIENCE,) if offloaded else PHASES
    between = (EXPERIENCE,) if offloaded else (GENERATION, EXPERIENCE, TRAINING)

    def part(name: str, size: int, phases: tuple[str, ...]) -> Component:
        return Component(group=group, role=SECTIONS[role], name=name, bytes=size, phases=phases)

    size = parameter_bytes(count, stage=stage, itemsize=itemsize, world=world)
    if c.ds.load_in_4bit:
        size = base_bytes(shape, stage=stage, itemsize=itemsize, world=world)
    found = [part("parameters", size, here)]
    if small := persistent_bytes(shape, stage=stage, itemsize=itemsize):
        found.append(part("small parameters", small, between))
    tokens = rank_tokens(c, EXPERIENCE)
    found.append(part("activations", forward_bytes(shape, tokens, itemsize) // tp, (EXPERIENCE,)))
    if role.is_language_model:
        found.append(part("logits", logit_bytes(tokens, shape.vocab), (EXPERIENCE,)))
    if isinstance(own, ActorConfig | CriticConfig):
        if c.ds.lora.rank > 0:
            count = shape.adapter_parameters(c.ds.lora) + (0 if role.is_language_model else shape.hidden)
            size = parameter_bytes(count, stage=stage, itemsize=itemsize, world=world)
            found.append(part("adapters", size, PHASES))
        found += _training(c, own, shape, part_of=(group, role), count=count, world=world)
    return found


def _taught(c: TrainPPOConfig, teacher: ModelShape, group: str) -> list[Component]:
    """What the policy holds of its teacher: the output layer, where whole distributions are learned."""
    if c.algo.distill.divergence is None or c.algo.distill.top_k:
        return []
    size = ITEMSIZE[c.ds.param_dtype] * teacher.vocab * teacher.hidden
    return [
        Component(group=group, role=SECTIONS[Role.POLICY], name="teacher's output layer", bytes=size, phases=PHASES)
    ]


def _training(
    c: TrainPPOConfig,
    own: ActorConfig | CriticConfig,
    shape: ModelShape,
    *,
    part_of: tuple[str, Role],
    count: int,
    world: int,
) -> list[Component]:
    group, role = part_of
    stage, itemsize, tp = c.ds.zero_stage, ITEMSIZE[c.ds.param_dtype], c.ds.tensor_parallel_size
    matrices = shape.layers * shape.layer_matrices // tp if own.optim == "muon" else 0
    states = optimizer_bytes(count, stage=stage, itemsize=itemsize, world=world, matrices=matrices)
    gradients, stepping = (
        gradient_bytes(count, stage=stage, itemsize=itemsize, world=world, stepping=inside) for inside in (False, True)
    )
    tokens = rank_tokens(c, TRAINING)
    checkpointing = own.gradient_checkpointing_enable
    activations = activation_bytes(shape, tokens, itemsize, checkpointing=checkpointing) // tp
    resting = (TRAINING, STEP) if c.ds.enable_sleep else PHASES
    kept = (TRAINING,) if stage < 3 or c.ds.enable_sleep else (GENERATION, EXPERIENCE, TRAINING)
    parts = [("gradients", gradients, kept), ("activations", activations, (TRAINING,))]
    if not c.ds.adam_offload:
        parts += [("gradients in fp32", stepping, (STEP,)), ("optimizer", states, resting)]
    if role is Role.POLICY:
        parts.append(("logits", logit_bytes(tokens, shape.vocab), (TRAINING,)))
    return [
        Component(group=group, role=SECTIONS[role], name=name, bytes=size, phases=phases)
        for name, size, phases in parts
    ]


def _engine(c: TrainPPOConfig, shape: ModelShape, group: str, budget: Budget) -> list[Component]:
    weights = engine_weight_bytes(c, shape)
    phases = (GENERATION,) if c.vllm.enable_sleep else PHASES
    return [
        Component(group=group, role="engines", name="parameters", bytes=weights, phases=phases),
        Component(group=group, role="engines", name="kv_cache", bytes=kv_cache_bytes(c, shape, budget), phases=phases),
    ]


def _as_judge(c: TrainPPOConfig) -> TrainPPOConfig:
    """With the judge's engines in the place of those that sample."""
    return build(c, {"vllm.tensor_parallel_size": c.judge.tensor_parallel_size, "vllm.enable_sleep": False})


def engine_weight_bytes(c: TrainPPOConfig, shape: ModelShape) -> int:
    """Weights on one GPU of an engine."""
    return math.ceil(ITEMSIZE[c.vllm.dtype] * shape.parameters / c.vllm.tensor_parallel_size)


def kv_cache_bytes(c: TrainPPOConfig, shape: ModelShape, budget: Budget) -> int:
    """KV cache on one GPU of an engine: what the utilisation leaves beside weights and program."""
    if budget.device_bytes is None:
        return budget.kv_bytes
    room = int(c.vllm.gpu_memory_utilization * budget.device_bytes)
    return max(0, room - engine_weight_bytes(c, shape) - PROGRAM_BYTES)


def kv_cache_tokens(c: TrainPPOConfig, shape: ModelShape, budget: Budget) -> int:
    """Tokens that one engine's KV cache holds. Each of its GPUs stores its share of the heads, at least one."""
    shards = min(c.vllm.tensor_parallel_size, shape.kv_heads)
    per_token = shape.kv_bytes_per_token(ITEMSIZE[c.vllm.dtype]) / shards
    return int(kv_cache_bytes(c, shape, budget) / per_token)


def totals(components: list[Component]) -> dict[str, dict[str, int]]:
    """Bytes per GPU by group and phase."""
    found: dict[str, dict[str, int]] = {}
    for part in components:
        row = found.setdefault(part.group, dict.fromkeys(PHASES, 0))
        for phase in part.phases:
            row[phase] += part.bytes
    return found
