"""The arrival board is read while others write to it."""

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
