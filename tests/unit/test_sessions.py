"""The list of live sessions, which whoever replaces a function of a library asks."""

from __future__ import annotations

from typing import Any

from dgc_horovod.session.base import Session, sessions


class _Optimizer:
    pass


class _Interrupted(Session[_Optimizer]):
    """While it is looked at, another thread wraps an optimizer."""

    other: Session[Any]

    @property
    def alive(self) -> bool:
        self.other.enter()
        return super().alive


def test_an_optimizer_is_wrapped_while_another_thread_lists_the_sessions():
    """It failed: dictionary changed size during iteration."""
    optimizer, another = _Optimizer(), _Optimizer()
    session, other = _Interrupted(optimizer), Session(another)
    session.other = other
    session.enter()
    ours = {session, other}
    assert [each for each in sessions() if each in ours] == [session]
    assert [each for each in sessions() if each in ours] == [session, other]
    del another
    assert [each for each in sessions() if each in ours] == [session]
