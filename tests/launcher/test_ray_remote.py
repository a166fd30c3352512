"""Typed calls on actors: which method of which actor is called, and which methods an actor has."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any, Protocol

from openrlhf.launcher.ray.remote import Remote, serves


class Clock(Protocol):
    """What the actors below hold."""

    async def wind(self, turns: int, *, gently: bool = False) -> str: ...

    def read(self) -> tuple[int, str]: ...

    def _private(self) -> None: ...


class Holder:
    def __init__(self) -> None:
        self.log: list[Any] = []


def note(actor: Holder, method: str, /, *args: Any, **kwargs: Any) -> Any:
    actor.log.append((method, args, kwargs))
    return method.upper()


async def note_later(actor: Holder, method: str, /, *args: Any, **kwargs: Any) -> Any:
    return note(actor, method, *args, **kwargs)


def either(actor: Holder, method: str, /, *args: Any, **kwargs: Any) -> Any:
    return (note_later if method == "wind" else note)(actor, method, *args, **kwargs)


def test_an_actor_has_the_methods_of_the_protocol_and_its_own() -> None:
    @serves(Clock, either)
    class Actor(Holder):
        def read(self) -> str:
            return "own"

    actor: Any = Actor()
    assert asyncio.run(actor.wind(3, gently=True)) == "WIND"
    assert actor.read() == "own"
    assert actor.log == [("wind", (3,), {"gently": True})]
    assert not hasattr(actor, "_private")


def test_served_methods_look_to_ray_like_those_of_the_protocol() -> None:
    @serves(Clock, either, group="control")
    class Actor(Holder):
        pass

    actor: Any = Actor
    assert inspect.iscoroutinefunction(actor.wind)
    assert not inspect.iscoroutinefunction(actor.read)
    assert inspect.signature(actor.wind) == inspect.signature(Clock.wind)
    assert {actor.wind.__ray_concurrency_group__, actor.read.__ray_concurrency_group__} == {"control"}


class Method:
    """`actor.method` as Ray gives it: writes down what it is called with."""

    def __init__(self, name: str) -> None:
        self.name, self.chosen = name, {}

    def options(self, **chosen: Any) -> Method:
        self.chosen = chosen
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self.name, self.chosen, args, kwargs


def test_a_call_reaches_the_method_that_it_names() -> None:
    clock: Remote[Clock] = Remote("clock 0", SimpleNamespace(wind=Method("wind"), read=Method("read")))
    assert clock.ask(Clock.wind, 3, gently=True) == ("wind", {}, (3,), {"gently": True})  # type: ignore[comparison-overlap]
    assert clock.ask_two(Clock.read)[:2] == ("read", {"num_returns": 2})
