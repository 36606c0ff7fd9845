"""The types of options."""

import click
import pytest

from mpidist.commands.options import (
    COLLECTIVE_NAMES,
    COSTS,
    DURATION,
    MILLIONS,
    OUTPUT,
    OUTPUT_OR_STDOUT,
    PAGE,
    SIZES,
    algorithm_names,
    byte_count,
    check_only,
    collective_name,
    integer_ranges,
    only,
)
from mpidist.errors import InvalidArgument


@pytest.mark.parametrize(("text", "seconds"), [("60", 60), ("90s", 90), ("1.5m", 90), ("1h", 3600)])
def test_duration_in_seconds(text, seconds):
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (DURATION, "1d", "expected a positive number with s, m or h"),
        (byte_count(least=4), "2", "at least 4 bytes"),
        (integer_ranges(2), "1-3", "whole numbers >= 2"),
        (integer_ranges(1), "3-1", "'3-1' is empty"),
        (MILLIONS, "4,0", "positive numbers"),
        (COSTS, "1,2", "three numbers"),
        (COSTS, "1,1,1,1:2", "three numbers"),
        (collective_name("pipeline"), "pipelin", "'pipeline'"),
        (algorithm_names(["allreduce"]), "ring,", "empty name"),
        (algorithm_names(["allreduce"]), "rign", "'ring'"),
        (algorithm_names(["allreduce"], one=True), "ring,tree", "unknown algorithm 'ring,tree'"),
        (OUTPUT, "-", "not standard output"),
        (OUTPUT_OR_STDOUT, "/nowhere/x", "cannot be written"),
    ],
)
def test_parsed_error_names_the_expected_form(kind, text, words):
    with pytest.raises((click.BadParameter, InvalidArgument), match=words):
        kind.convert(text, None, None)


def test_parsed_values():
    for kind, text, value in (
        (byte_count(), "64K", 65536),
        (SIZES, "8,64K", [8, 65536]),
        (integer_ranges(1), "5,1-3", [5, 1, 2, 3]),
        (MILLIONS, "4,17", [4.0, 17.0]),
        (COLLECTIVE_NAMES, "allreduce,scan", ("allreduce", "scan")),
        (algorithm_names(["scan"], "auto"), "auto, chain", ("auto", "chain")),
        (algorithm_names(["allreduce"], one=True), "tree:3", "tree:3"),
        (OUTPUT_OR_STDOUT, "-", "-"),
    ):
        assert kind.convert(text, None, None) == value
    costs = COSTS.convert("1:2:1,1,0.5,0.1", None, None)
    assert (costs.F, costs.message) == ((1.0, 2.0, 1.0), 0.1)


def test_shell_complete_names_after_a_comma_or_files():
    def of(kind, text):
        return [(item.value, item.type) for item in kind.shell_complete(None, None, text)]

    assert ("ring,tree", "plain") in of(algorithm_names(["allreduce"]), "ring,tr")
    assert of(OUTPUT, "a") == of(PAGE, "a") == [("a", "file")]
    assert of(DURATION, "") == []


def test_check_only_names_options_of_another_use():
    @click.command()
    @click.option("--plain")
    @only("pictures", click.option("--svg", default="a"), click.argument("words", nargs=-1))
    @only("texts", click.option("--wide"))
    @click.option("--use")
    @click.pass_context
    def command(context, use, **options):
        check_only(context, *filter(None, [use]))

    def call(*line):
        command.main(list(line), standalone_mode=False)

    call("--plain", "x")
    call("--use", "pictures", "--svg", "a", "word")
    for line, words in (
        (("--svg", "a", "word"), "^--svg, WORDS: only for pictures$"),
        (("--use", "texts", "--svg", "b"), "^--svg: only for pictures$"),
        (("--use", "pictures", "--wide", "1"), "^--wide: only for texts$"),
    ):
        with pytest.raises(click.UsageError, match=words):
            call(*line)
