"""The arrival board is read while others write to it."""

import pytest

from mpidist.backends import board as board_module
from mpidist.backends.board import Board, private_words

WIDTH = 8


class Writing:
    """Words that another rank writes to between two of our looks."""

    def __init__(self, words, writes):
        self.words, self.writes = words, list(writes)

    def __getitem__(self, index):
        value = self.words[index]
        if self.writes and index >= WIDTH:  # after each look at rank 1, its next write happens
            at, new = self.writes.pop(0)
            self.words[at] = new
        return value

    def __setitem__(self, index, value):
        self.words[index] = value


def board_with(sequence, prints, writes):
    words = private_words(2)
    board = Board(words, 0, (0, 1))
    Board(words, 1, (0, 1))
    words[WIDTH] = sequence
    for slot, value in enumerate(prints):
        words[WIDTH + 4 + slot] = value
    board.announce(5, 77)
    board.words = Writing(words, writes)
    return board


def test_arrival_during_the_check():
    # rank 1 is at #4, its slot of #5 still holds that of #1; while we look it announces #5
    announces = [(WIDTH + 4 + 1, 77), (WIDTH, 5)]
    assert board_with(4, (0, 11, 0, 0), announces).different(5, 77) == ()
    assert board_with(4, (0, 11, 0, 0), announces[1:]).different(5, 77) == ()


def test_overwritten_fingerprint():
    # rank 1 is at #8 and about to announce #9, whose fingerprint goes where that of #5 is
    assert board_with(8, (0, 99, 0, 0), []).different(5, 77) == ()


def test_a_rank_with_another_operation_is_different():
    assert board_with(5, (0, 11, 0, 0), []).different(5, 77) == (1,)
    assert board_with(7, (0, 11, 0, 0), []).different(5, 77) == (1,)


class Reordering:
    """Words on a processor that swaps stores, and loads, unless a fence is between them.

    What is stored becomes visible latest first at the next fence or look of a rank; what is loaded
    was fetched before the last fence, the first time that it is looked at after that.
    """

    def __init__(self, words):
        self.visible, self.stored, self.fetched = words, [], {}

    def __setitem__(self, index, value):
        self.stored.append((index, value))

    def fence(self):
        for index, value in self.stored:
            self.visible[index] = value
        self.stored.clear()
        self.fetched.clear()

    def __getitem__(self, index):
        return self.fetched.pop(index, self.visible[index])

    def moments(self):
        """Yield after each store that another rank may see, in the worst order."""
        while self.stored:
            index, value = self.stored.pop()
            self.visible[index] = value
            yield


@pytest.fixture
def reordered(monkeypatch):
    """Lets boards meet a processor that reorders; call it with the words."""

    def run(words):
        made = Reordering(words)
        monkeypatch.setattr(board_module, "STORES_KEEP_ORDER", False)
        monkeypatch.setattr(board_module, "fence", made.fence)
        return made

    return run


def test_an_announcement_is_stored_after_its_fingerprint(reordered):
    """Whoever sees the number finds its fingerprint, not that of the operation four before."""
    words = private_words(2)
    mine, other = Board(words, 0, (0, 1)), Board(words, 1, (0, 1))
    other.announce(5, 77)
    words[4 + 1] = 11  # of the operation four before
    mine.words = reordered(words)
    mine.announce(5, 77)
    for _ in mine.words.moments():
        assert other.different(5, 77) == ()
    assert other.all_reached(5) and other.different(5, 77) == ()


def test_a_fingerprint_that_was_read_before_its_number(reordered):
    """It is read again after a fence before the ranks are said to differ."""
    board = board_with(5, (0, 77, 0, 0), [])
    board.words = reordered(board.words.words)
    board.words.fetched = {WIDTH + 4 + 1: 11}
    assert board.different(5, 77) == ()
    board.words.visible[WIDTH + 4 + 1] = 12
    assert board.different(5, 77) == (1,)


def test_a_rank_leaves_after_its_last_announcement(reordered):
    words = private_words(2)
    mine, other = Board(words, 0, (0, 1)), Board(words, 1, (0, 1))
    mine.words = reordered(words)
    mine.announce(5, 77)
    mine.leave()
    for _ in mine.words.moments():
        assert other.left(5) == ()
    other.words = reordered(words)
    other.words.fetched = {0: 4}
    assert other.has_left(0) and other.left(5) == ()
