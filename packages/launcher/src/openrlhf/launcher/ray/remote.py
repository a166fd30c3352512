"""Typed calls on Ray actors: a call names the method itself, as in `engine.ask(EngineControl.pause, clear_cache=True)`.

So pyright checks arguments and answers of what crosses a process border, and no name in quotes is left behind when a
method is renamed. Which methods an actor has beyond its own is said once, by `serves`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import ray

from openrlhf.launcher.ray.calls import WorkerDiedError, gather

log = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Remote(Generic[T]):
    """An actor that has the methods of `T`. name: what messages call it, as in "policy rank 0"."""

    name: str
    actor: Any

    @overload
    def ask(
        self, method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> ray.ObjectRef[R]: ...
    @overload
    def ask(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> ray.ObjectRef[R]: ...
    def ask(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the call; `gather` or `get` fetch the answer."""
        return getattr(self.actor, method.__name__).remote(*args, **kwargs)

    @overload
    def ask_two(
        self, method: Callable[Concatenate[T, P], Coroutine[Any, Any, tuple[A, B]]], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[ray.ObjectRef[A], ray.ObjectRef[B]]: ...
    @overload
    def ask_two(
        self, method: Callable[Concatenate[T, P], tuple[A, B]], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[ray.ObjectRef[A], ray.ObjectRef[B]]: ...
    def ask_two(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`ask` for a pair whose halves have references of their own: who fetches one need not fetch the other."""
        return getattr(self.actor, method.__name__).options(num_returns=2).remote(*args, **kwargs)

    def stream(
        self, method: Callable[Concatenate[T, P], AsyncIterator[R]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[Awaitable[R]]:
        """The answers of an asynchronous generator as they come."""
        return getattr(self.actor, method.__name__).options(num_returns="streaming").remote(*args, **kwargs)

    def kill(self) -> None:
        """End the actor's process without asking it."""
        ray.kill(self.actor)


async def ask_all(
    workers: Sequence[Remote[T]],
    what: str,
    timeout: float,
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[R]:
    """The answers of all to the same call; the first failure is raised (`gather`)."""
    refs = [worker.ask(method, *args, **kwargs) for worker in workers]
    return await gather(refs, what=what, names=[worker.name for worker in workers], timeout=timeout)


async def ask_living(
    workers: Sequence[Remote[T]],
    what: str,
    timeout: float,
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[R]:
    """The answers of those that live; of the others a warning says so. Raises other failures."""
    calls = [ask_all([worker], what, timeout, method, *args, **kwargs) for worker in workers]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, WorkerDiedError):
            log.warning("%s", answer)
        elif isinstance(answer, BaseException):
            raise answer
    return [answer[0] for answer in answers if not isinstance(answer, BaseException)]


def in_group(name: str) -> Callable[[F], F]:
    """Mark a method as one of this concurrency group: `ray.method`, whose annotations hide what it is called with."""
    mark: Any = ray.method(concurrency_group=name)
    return mark


class Run(Protocol):
    """Runs a method of what an actor holds: (actor, name of the method, its arguments)."""

    def __call__(self, actor: Any, method: str, /, *args: Any, **kwargs: Any) -> Any: ...


def serves(protocol: type, run: Run, *, group: str | None = None) -> Callable[[type[T]], type[T]]:
    """Class decorator: give an actor the methods of `protocol`; each does what `run` does with its name and arguments.

    Methods that the class body defines stay. group: the concurrency group of the others.
    """

    def decorate(actor: type[T]) -> type[T]:
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_") and name not in vars(actor):
                served = _served(method, run)
                setattr(actor, name, in_group(group)(served) if group else served)
        return actor

    return decorate


def _served(method: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """An actor method with this one's name and signature; Ray tells coroutines from functions by how they are made."""
    served: Any
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await run(self, method.__name__, *args, **kwargs)

        served = call_async
    else:

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run(self, method.__name__, *args, **kwargs)

        served = call
    # Ray looks for a method's concurrency group behind `__wrapped__`, where the protocol's function has none
    served.__signature__ = inspect.signature(method)
    del served.__wrapped__
    return served
