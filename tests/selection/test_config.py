"""CollectiveConfig: what is allowed, what each field does, and how it is written down."""

import dataclasses
import inspect
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.errors import ConfigError
from mpidist.selection.config import FIELDS, VARIABLES, CollectiveConfig, misspelt
from mpidist.selection.strategy import Strategy

GLOBAL = {"global_allreduce": "ring", "global_reduce": "tree:2", "global_broadcast": "tree:2"}


def test_config_validation():
    config = CollectiveConfig()
    config.validate()
    with pytest.raises(ConfigError, match="num_devices=0.*>= 1"):
        config.replace(num_devices=0)
    with pytest.raises(ConfigError, match="global_allreduce, global_reduce, global_broadcast"):
        config.replace(num_nodes=2)
    config.replace(num_nodes=2, **GLOBAL).validate()


def test_strategy_selection():
    config = CollectiveConfig(tree_threshold_bytes=1024, tree_arity=2, local_allreduce="auto")
    assert config.select_allreduce(512, 4).kind == "tree"
    assert config.select_allreduce(2048, 4) == "ring"
    assert config.select_allreduce(2048, 2).kind == "tree"


def test_defaults_of_the_original():
    config = CollectiveConfig()
    assert dataclasses.asdict(config) == {
        "num_devices": 1,
        "local_allreduce": "auto",
        "local_reduce": "auto",
        "local_broadcast": "auto",
        "num_nodes": None,
        "global_allreduce": None,
        "global_reduce": None,
        "global_broadcast": None,
        "tree_threshold_bytes": 1024 * 1024,
        "tree_arity": 2,
        "timeout": 60.0,
        "given": frozenset(),
    }


def test_presets():
    single = CollectiveConfig.single_node(4)
    assert (single.num_devices, single.local_allreduce, single.num_nodes) == (4, "ring", None)
    multi = CollectiveConfig.multi_node(4, 2)
    assert (multi.num_devices, multi.num_nodes, multi.local_allreduce) == (4, 2, "tree:2")
    assert multi.global_allreduce == "ring"
    assert multi.global_reduce == multi.global_broadcast == "tree:2"
    assert multi.local_reduce == multi.local_broadcast == "auto"


@pytest.mark.parametrize(
    "values",
    [
        {"num_devices": -1},
        {"num_devices": True},
        {"num_devices": 2.0},
        {"num_nodes": 0, **GLOBAL},
        {"num_nodes": 2, **GLOBAL, "global_reduce": None},
        {"tree_arity": 1},
        {"tree_threshold_bytes": -1},
        {"timeout": 0},
        {"timeout": -1.0},
        {"timeout": float("nan")},
        {"timeout": "60"},
        {"local_allreduce": "direct"},
        {"local_reduce": "ring"},
        {"local_broadcast": "ring"},
        {"global_allreduce": "direct"},
        {"global_broadcast": "ring"},
        {"local_allreduce": None},
        {"local_allreduce": "tree:1"},
        {"local_allreduce": "tree:"},
        {"local_allreduce": "ring:2"},
    ],
)
def test_refused_values_name_the_field(values):
    with pytest.raises(ConfigError) as error:
        CollectiveConfig(**values)
    assert any(name in str(error.value) for name in values)


def test_near_names():
    with pytest.raises(ConfigError, match="'linear'"):
        CollectiveConfig(local_allreduce="liner")
    with pytest.raises(ConfigError, match="'tree_arity'"):
        CollectiveConfig().replace(tree_aritty=3)
    with pytest.raises(ConfigError, match="'timeout'"):
        CollectiveConfig.from_json('{"timeouts": 3}')
    with pytest.raises(ConfigError, match="'num_nodes'"):
        CollectiveConfig().replace(num_node=2)


def test_frozen_and_keyword_only():
    config = CollectiveConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.timeout = 3.0
    with pytest.raises(TypeError, match="positional"):
        CollectiveConfig(4)
    assert tuple(inspect.signature(CollectiveConfig).parameters) == FIELDS


def test_strategies():
    assert Strategy("Linear") == "linear"
    assert Strategy(" TREE:04 ") == "tree:4" == Strategy.tree(4)
    assert Strategy("tree:8").kind == "tree" and Strategy("tree:8").arity == 8
    assert Strategy("ring").arity is Strategy("tree").arity is None
    names = {"auto": "auto", "ring": "ring", "tree": "tree:3", "tree:5": "tree:5"}
    names |= {"linear": "linear"}
    assert {text: Strategy(text).algorithm(3) for text in names} == names
    assert pickle.loads(pickle.dumps(Strategy("tree:4"))).arity == 4
    with pytest.raises(ConfigError, match=r"\b3\b"):
        Strategy(3)


# -- every field acts ---------------------------------------------------------------------------


def test_defaults_do_not_steer():
    for collective in ("allreduce", "reduce", "broadcast", "allgather", "barrier"):
        assert CollectiveConfig().steering(collective, 8, 4) is None
        assert CollectiveConfig(timeout=3.0, num_devices=4).steering(collective, 8, 4) is None
    assert CollectiveConfig(local_allreduce="auto").steering("allreduce", 8, 4) is None


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "broadcast"])
def test_local_strategy_steers_its_collective_only(collective):
    config = CollectiveConfig(**{f"local_{collective}": "tree:4"})
    for other in ("allreduce", "reduce", "broadcast", "gather"):
        assert config.steering(other, 1 << 30, 8) == ("tree:4" if other == collective else None)
    config = CollectiveConfig(**{f"local_{collective}": "linear"})
    assert config.steering(collective, 8, 8) == "linear"


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "broadcast"])
@pytest.mark.parametrize("name", ["centralized", "direct"])
def test_a_strategy_has_the_name_of_its_algorithm(collective, name):
    """These two meant linear, and the second is the name of another algorithm."""
    with pytest.raises(ConfigError, match=f"local_{collective}: .*{name}.*linear"):
        CollectiveConfig(**{f"local_{collective}": name})


def test_threshold_steers_allreduce():
    config = CollectiveConfig(tree_threshold_bytes=1000)
    assert config.steering("allreduce", 999, 4) == "tree:2"
    assert config.steering("allreduce", 1000, 4) == "ring"
    assert config.steering("allreduce", 1000, 3) == "tree:2"
    assert config.steering("broadcast", 8, 4) is None
    # Set to the value of the default, it is still the user's word.
    assert CollectiveConfig(tree_threshold_bytes=1 << 20).steering("allreduce", 8, 4) == "tree:2"


def test_arity_steers():
    config = CollectiveConfig(tree_arity=4)
    assert config.steering("allreduce", 8, 4) == "tree:4"
    assert config.steering("allreduce", 1 << 20, 4) == "ring"
    assert config.steering("reduce", 8, 4) == config.steering("broadcast", 8, 4) == "tree:4"
    assert config.steering("broadcast", 1 << 20, 4) is None
    assert config.replace(local_allreduce="tree").steering("allreduce", 1 << 30, 4) == "tree:4"
    assert config.replace(local_allreduce="tree:3").steering("allreduce", 8, 4) == "tree:3"


LEADERS_BY_STARS = "hierarchical_leaders/linear/linear"


def test_two_levels():
    config = CollectiveConfig.multi_node(2, 3)
    assert config.two_level and not CollectiveConfig.single_node(2).two_level
    assert config.level("allreduce", "local", 8, 2) == "tree:2"
    assert config.level("allreduce", "global", 8, 3) == "ring"
    assert config.level("reduce", "global", 8, 3) == "tree:2"
    assert config.level("broadcast", "global", 8, 3) == "tree:2"
    assert config.level("broadcast", "local", 8, 3) == "auto"
    config = config.replace(
        tree_arity=3, global_allreduce="auto", global_reduce="tree", timeout=None
    )
    assert config.level("allreduce", "global", 8, 4) == "tree:3"
    assert config.level("allreduce", "global", 1 << 20, 4) == "ring"
    assert config.level("reduce", "global", 8, 4) == "tree:3"
    assert config.level("broadcast", "local", 8, 4) == "tree:3"
    for which in ("local", "global"):
        inner = config.at_level(which)
        assert not inner.two_level and inner.timeout is None and "num_devices" not in inner.given
    with pytest.raises(ConfigError, match="'inner': .*local or global"):
        config.at_level("inner")


@pytest.mark.parametrize(
    ("changes", "collective", "expected"),
    [
        ({}, "allreduce", "hierarchical_leaders/tree:2/ring"),
        ({}, "reduce", "hierarchical/direct/tree:2"),
        ({}, "broadcast", "hierarchical/direct/tree:2"),
        ({"local_allreduce": "ring"}, "allreduce", "hierarchical/ring/ring"),
        ({"local_allreduce": "auto"}, "allreduce", "hierarchical/direct/ring"),
        ({"global_allreduce": "auto"}, "allreduce", "hierarchical_leaders/tree:2/ring"),
        ({"local_allreduce": "auto", "global_allreduce": "auto"}, "allreduce", None),
        ({"global_reduce": "auto"}, "reduce", None),
        ({"local_broadcast": "tree:3"}, "broadcast", "hierarchical_leaders/tree:3/tree:2"),
        ({"local_reduce": "linear", "global_reduce": "linear"}, "reduce", LEADERS_BY_STARS),
        ({}, "allgather", None),
    ],
)
def test_two_levels_make_up_one_algorithm(changes, collective, expected):
    config = CollectiveConfig.multi_node(2, 3).replace(**changes)
    assert config.asked(collective, 8, 6) == expected


def test_on_one_level_as_ever():
    """What does not commute is not nested; a configuration of one level has no second."""
    assert CollectiveConfig.multi_node(2, 3).asked("allreduce", 8, 6, commutes=False) == "tree:2"
    assert CollectiveConfig.single_node(4).asked("allreduce", 8, 4) == "ring"


def test_counts_are_checked_against_the_ranks():
    CollectiveConfig().check_size(7)
    CollectiveConfig.single_node(4).check_size(4)
    CollectiveConfig.multi_node(2, 3).check_size(6)
    with pytest.raises(ConfigError, match="rank 1: num_devices=4, num_nodes=None needs 4 ranks"):
        CollectiveConfig.single_node(4).check_size(3, rank=1)
    with pytest.raises(ConfigError, match="needs 6 ranks, the communicator has 4"):
        CollectiveConfig.multi_node(2, 3).check_size(4)
    without_devices = CollectiveConfig(num_nodes=2, **GLOBAL)
    without_devices.check_size(4)
    with pytest.raises(ConfigError, match="5 ranks are not divisible by 2 nodes"):
        without_devices.check_size(5)


def test_groups():
    config = CollectiveConfig.multi_node(2, 2)
    assert config.groups(((0, 1, 2, 3),)) == ((0, 1), (2, 3))
    assert config.groups(((0, 2), (1, 3))) == ((0, 2), (1, 3))
    assert config.groups(((0,), (1, 2, 3))) == ((0, 1), (2, 3))
    assert CollectiveConfig().groups(((0,), (1, 2))) == ((0,), (1, 2))


# -- writing it down ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        CollectiveConfig(),
        CollectiveConfig.single_node(4),
        CollectiveConfig.multi_node(4, 2),
        CollectiveConfig(timeout=None, tree_arity=2, local_broadcast="linear"),
    ],
)
def test_json_keeps_what_was_set(config):
    again = CollectiveConfig.from_json(config.to_json())
    assert again == config and again.given == config.given
    assert set(json.loads(config.to_json())) == config.given
    assert isinstance(again.local_allreduce, Strategy)


@pytest.mark.parametrize("text", ["", "3", "[]", "{", '{"timeout": "x"}', '{"given": ["timeout"]}'])
def test_bad_json(text):
    with pytest.raises(ConfigError):
        CollectiveConfig.from_json(text)


def test_replace_remembers():
    config = CollectiveConfig(tree_arity=3).replace(timeout=5.0)
    assert config.given == {"tree_arity", "timeout"}
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(CollectiveConfig(timeout=5.0, tree_arity=3))
    assert CollectiveConfig(timeout=60.0) != CollectiveConfig()


def test_environment():
    environ = {
        "MPIDIST_NUM_DEVICES": "2",
        "MPIDIST_NUM_NODES": "3",
        "MPIDIST_LOCAL_ALLREDUCE": "tree:4",
        "MPIDIST_LOCAL_REDUCE": "linear",
        "MPIDIST_LOCAL_BROADCAST": "linear",
        "MPIDIST_GLOBAL_ALLREDUCE": "ring",
        "MPIDIST_GLOBAL_REDUCE": "tree",
        "MPIDIST_GLOBAL_BROADCAST": "tree:3",
        "MPIDIST_TREE_THRESHOLD_BYTES": "4096",
        "MPIDIST_TREE_ARITY": "8",
        "MPIDIST_TIMEOUT": "2.5",
        "MPIDIST_DEBUG": "1",
    }
    config = CollectiveConfig.from_environment(environ)
    assert config.given == set(FIELDS)
    assert config == CollectiveConfig(
        num_devices=2,
        num_nodes=3,
        local_allreduce="tree:4",
        local_reduce="linear",
        local_broadcast="linear",
        global_allreduce="ring",
        global_reduce="tree",
        global_broadcast="tree:3",
        tree_threshold_bytes=4096,
        tree_arity=8,
        timeout=2.5,
    )


def test_environment_overrides():
    base = CollectiveConfig(tree_arity=3, timeout=7.0)
    config = CollectiveConfig.from_environment({"MPIDIST_TIMEOUT": "none"}, base)
    assert config.timeout is None and config.tree_arity == 3
    assert CollectiveConfig.from_environment({"MPIDIST_TIMEOUT": ""}, base) == base
    assert CollectiveConfig.from_environment({}) == CollectiveConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MPIDIST_TREE_ARITY", "two"),
        ("MPIDIST_TREE_ARITY", "1"),
        ("MPIDIST_TREE_ARITY", "none"),
        ("MPIDIST_TIMEOUT", "soon"),
        ("MPIDIST_TIMEOUT", "0"),
        ("MPIDIST_LOCAL_REDUCE", "ring"),
        ("MPIDIST_NUM_NODES", "2"),
    ],
)
def test_bad_environment_names_the_variable(name, text):
    with pytest.raises(ConfigError, match=name):
        CollectiveConfig.from_environment({name: text})


# -- the communicator listens ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "collective", "nbytes", "name"),
    [
        ({"local_allreduce": "ring"}, "allreduce", 8, "ring"),
        ({"local_allreduce": "linear"}, "allreduce", 8, "linear"),
        ({"local_reduce": "linear"}, "reduce", 8, "linear"),
        ({"local_broadcast": "tree:3"}, "broadcast", 8, "tree:3"),
        ({"tree_threshold_bytes": 64}, "allreduce", 63, "tree:2"),
        ({"tree_threshold_bytes": 64}, "allreduce", 64, "ring"),
        ({"tree_arity": 4}, "broadcast", 8, "tree:4"),
    ],
)
def test_auto_follows_the_configuration(values, collective, nbytes, name):
    def rank_main(comm):
        candidate, _ = comm.explain(collective, nbytes)
        return candidate.name

    assert run_simulated(4, rank_main, config=CollectiveConfig(**values)) == [name] * 4


def test_the_call_overrules_the_configuration():
    def rank_main(comm):
        return float(comm.allreduce(1.0, algorithm="linear"))

    config = CollectiveConfig(local_allreduce="ring")
    assert run_simulated(3, rank_main, config=config) == [3.0] * 3


def test_timeout_is_the_communicators():
    config = CollectiveConfig(timeout=12.5)
    assert run_simulated(1, lambda comm: comm.timeout, config=config) == [12.5]


def test_two_levels_give_the_same_results():
    def rank_main(comm):
        x = np.arange(3.0) + comm.rank
        total = comm.reduce(x, root=2)
        y = comm.broadcast(x.copy(), root=3)
        return comm.allreduce(x).tolist(), total is None or total.tolist(), y.tolist()

    config = CollectiveConfig.multi_node(2, 2)
    for rank, (everyone, total, y) in enumerate(run_simulated(4, rank_main, config=config)):
        assert everyone == [6.0, 10.0, 14.0] and y == [3.0, 4.0, 5.0]
        assert total == ([6.0, 10.0, 14.0] if rank == 2 else True)


def test_counts_that_contradict_the_ranks_are_refused():
    with pytest.raises(ConfigError, match="needs 4 ranks, the communicator has 3"):
        run_simulated(3, lambda comm: None, config=CollectiveConfig.single_node(4))


# -- names of environment variables ---------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


def named_in(*paths):
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    return set(re.findall(r"\bMPIDIST_[A-Z_]*[A-Z]\b", text))


def test_misspelt_variable():
    environ = dict.fromkeys(VARIABLES, "1") | {"HOME": "/", "MPIDIST_TEST_GPU": "needed"}
    assert misspelt(environ) == []
    (sentence,) = misspelt(environ | {"MPIDIST_TIMEUOT": "3"})
    assert sentence == "MPIDIST_TIMEUOT=3 has no effect: did you mean MPIDIST_TIMEOUT?"
    (sentence,) = misspelt(environ | {"MPIDIST_debug": "1"})
    assert sentence.endswith("did you mean MPIDIST_DEBUG?")


def test_the_list_of_variables_is_complete():
    """What the package reads, what it lists, and what the documentation explains are the same."""
    known, of_tests = set(VARIABLES), "MPIDIST_TEST_"
    read = named_in(*(ROOT / "mpidist").rglob("*.py"))
    assert {name for name in read if not name.startswith(of_tests)} <= known
    fields = {f"MPIDIST_{name.upper()}" for name in FIELDS}
    assert known - fields <= read
    page = (ROOT / "docs/configuration.rst").read_text(encoding="utf-8")
    table = re.findall(r"^   \* - ``(MPIDIST_\w+)``$", page, re.MULTILINE)
    assert sorted(table) == sorted(known - fields)
    for path in (ROOT / "docs").glob("*.rst"):
        assert named_in(path) <= known, path.name
